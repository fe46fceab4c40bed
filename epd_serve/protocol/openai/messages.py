"""Validate chat messages from clients and convert them to wire messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import WHOLE, MessageModel, RequestModel, broken_rule, text_or
from epd_serve.protocol.openai.tool_format import HERMES, is_object
from epd_serve.protocol.wire import CalledFunction, ChatMessage, Part
from epd_serve.types import AS_THE_MODEL, Modality, VideoSampling

#: Limits on the messages of a chat, and on the parts of all its messages together.
MAX_MESSAGES = 2048
MAX_PARTS = 4096
#: Limit on the tool calls of one message.
MAX_CALLS = 128


class MediaSource(msgspec.Struct, frozen=True, kw_only=True):
    """A media item of a request.

    Attributes:
        param: its field in the request, for error messages.
        sampling: frames of a video to use.
        processing: processor options other than frame sampling, as JSON, or "".
        low_detail: scale the image down (:data:`epd_serve.media.picture.LOW_DETAIL_PIXELS`).
        format: audio format named by the request, or "".
        raw: the file's bytes, if the request contains them unencoded.
    """

    url: str
    param: str
    modality: Modality = "image"
    sampling: VideoSampling = AS_THE_MODEL
    processing: str = ""
    low_detail: bool = False
    format: str = ""
    raw: bytes | None = None

    @property
    def is_inline(self) -> bool:
        """True if the request itself contains the item."""
        return self.url[:5].lower() == "data:"


class MediaUrl(MessageModel):
    """Media URL. ``detail`` "low" scales an image down to fit 512x512 pixels; "auto" and "high" keep its size."""

    url: str = Field(description="http(s):// or data:...;base64.")
    detail: Literal["auto", "high", "low"] | None = Field(None, description="low: scale down to 512x512 pixels.")


class InputAudio(MessageModel):
    """An audio file in base64."""

    data: str = Field(description="The file in base64.")
    format: Literal["wav", "mp3", "flac", "ogg"] = Field(description="Format of the file.")


NumFrames = Annotated[int, Field(ge=1, lt=1 << 20), WHOLE]
NumFramesOrAll = Annotated[int, Field(ge=-1, lt=1 << 20), WHOLE]
NumPixels = Annotated[int, Field(ge=1), WHOLE]


class VideoFrames(RequestModel):
    """Frame sampling by count, by rate, or by whichever gives fewer frames."""

    num_frames: NumFramesOrAll | None = Field(None, description="Frames of a video, evenly spaced; -1: all.")
    fps: float | None = Field(None, gt=0, le=1000, description="Frames per second.")


class ProcessorKwargs(VideoFrames):
    """Options of the model's processor. ``fps`` and ``num_frames`` are mutually exclusive; the processor resizes
    images to between ``min_pixels`` and ``max_pixels``."""

    num_frames: NumFrames | None = Field(None, description="Frames of a video, evenly spaced.")
    max_frames: NumFrames | None = Field(None, description="Maximum frames of a video.")
    do_sample_frames: bool | None = Field(None, description="false: use all frames read.")
    min_pixels: NumPixels | None = Field(None, description="Minimum pixels of an image after resizing.")
    max_pixels: NumPixels | None = Field(None, description="Maximum pixels of an image after resizing.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if None not in (self.min_pixels, self.max_pixels) and self.min_pixels > self.max_pixels:  # type: ignore[operator]
            raise broken_rule(f"min_pixels ({self.min_pixels}) is more than max_pixels ({self.max_pixels})")
        if None not in (self.num_frames, self.fps):
            raise broken_rule("fps and num_frames are mutually exclusive; send only one")
        if self.do_sample_frames is False and {self.num_frames, self.fps, self.max_frames} != {None}:
            raise broken_rule("num_frames, fps and max_frames sample frames; remove do_sample_frames")
        return self


_NO_FRAMES, _NO_KWARGS = VideoFrames.model_validate({}), ProcessorKwargs.model_validate({})


class AnyProcessorKwargs(ProcessorKwargs):
    """Processor options for a vLLM backend, which validates the undeclared ones."""

    model_config = ConfigDict(extra="allow")


class MediaIoKwargs(RequestModel):
    """Frames to read: evenly spaced from a video file, or the first ``num_frames`` of a frame list, whose frame
    rate is ``fps`` (default 1)."""

    video: VideoFrames | None = Field(None, description="Frames to read from each video.")


UrlOrText = Annotated[MediaUrl | None, text_or(MediaUrl | None, lambda text: {"url": text})]
#: Part type → modality of its item.
MODALITY_OF: dict[str, Modality] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}


class ContentPart(MessageModel):
    """A content part. A part of type T sets the field T and no other."""

    type: Literal["text", "image_url", "video_url", "audio_url", "input_audio"] = Field(
        description="Type of the part, and name of the field it sets."
    )
    text: str | None = Field(None, description="A text.")
    image_url: UrlOrText = Field(None, description="A picture.")
    video_url: UrlOrText = Field(None, description="A video, or data:video/jpeg;base64, and frames with commas.")
    audio_url: UrlOrText = Field(None, description="A sound by URL.")
    input_audio: InputAudio | None = Field(None, description="A sound as a file.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.text, self.image_url, self.video_url, self.audio_url, self.input_audio
        if getattr(self, self.type) is None or given.count(None) != len(given) - 1:
            raise broken_rule(f"a part of type {self.type!r} needs exactly the field {self.type!r}", self.type)
        return self


def _as_parts(content: Any) -> Any:
    """Return a list of parts, or None for an empty list, which instructor sends with ``tool_calls``."""
    if content == []:
        return None
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class FunctionCall(MessageModel):
    """A function call. ``arguments`` is a JSON object as text, incomplete if the call was cut off."""

    name: str = Field(min_length=1, description="Name of the function.")
    arguments: str = Field(description="A JSON object as text.")


class ToolCall(MessageModel):
    id: str = Field(description="Id of the call, which the tool message refers to.")
    type: Literal["function"] = Field("function", description="All tools are functions.")
    function: FunctionCall = Field(description="The call.")


class Message(MessageModel):
    """A chat message. Only "assistant" may have ``tool_calls``, and may then omit ``content``; "tool" needs a
    ``tool_call_id``. ``name`` and ``reasoning_content`` (or ``reasoning``) reach chat templates that use them."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Author of the message.")
    content: Annotated[
        Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None),
    ] = Field(None, description="A text, or a list of parts.")
    tool_calls: list[ToolCall] | None = Field(
        None, max_length=MAX_CALLS, fail_fast=True, description="Tool calls by the assistant."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")
    name: str | None = Field(None, description="For chat templates that use it.")
    reasoning_content: str | None = Field(None, description="For chat templates that use it.")
    reasoning: str | None = Field(None, description="Alias of reasoning_content.")
    function_call: None = Field(None, description="Send tool_calls instead.")
    audio: None = Field(None, description="Answers are text only.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise broken_rule("only assistant messages may call tools", "tool_calls")
        if self.role != "assistant" and (self.reasoning_content or self.reasoning):
            raise broken_rule("only assistant messages may contain reasoning", "reasoning_content")
        if self.content is None and not self.tool_calls:
            raise broken_rule("content is required", "content", "missing_required_parameter")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise broken_rule(
                "a tool message, and no other, needs the tool_call_id of the call it answers", "tool_call_id"
            )
        return self


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The conversation so far."),
]


def media_of(
    messages: Sequence[Message], reading: MediaIoKwargs | None, kwargs: ProcessorKwargs | None
) -> list[MediaSource]:
    """Return the media items in chat order. Raises InvalidRequest for contradictory options."""
    sampling, processing = AS_THE_MODEL, ""
    if reading is not None or kwargs is not None:
        read, asked = (reading and reading.video) or _NO_FRAMES, kwargs or _NO_KWARGS
        if asked.do_sample_frames and (read.num_frames not in (None, -1) or read.fps is not None):
            raise InvalidRequest(
                "mm_processor_kwargs: do_sample_frames samples from all frames of the file; remove num_frames and "
                "fps from media_io_kwargs",
                param="mm_processor_kwargs.do_sample_frames",
            )
        sampling = VideoSampling(
            num_frames=read.num_frames,
            fps=read.fps,
            processor_num_frames=asked.num_frames,
            processor_fps=asked.fps,
            max_frames=asked.max_frames,
            do_sample_frames=asked.do_sample_frames,
        )
        processing = _processing(asked, messages)
    sources: list[MediaSource] = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content or ()):
            if part.text is not None:
                continue
            param, modality = f"messages[{i}].content[{j}].{part.type}", MODALITY_OF[part.type]
            if (sound := part.input_audio) is not None:
                url, param = f"data:audio/{sound.format};base64,{sound.data}", f"{param}.data"
            else:
                named = part.image_url or part.video_url or part.audio_url
                assert named is not None, "a part has the field of its type"
                url, param = named.url, f"{param}.url"
            sources.append(
                MediaSource(
                    url=url,
                    param=param,
                    modality=modality,
                    sampling=sampling if modality == "video" else AS_THE_MODEL,
                    processing=processing,
                    low_detail=part.image_url is not None and part.image_url.detail == "low",
                    format="" if sound is None else sound.format,
                )
            )
    return sources


def _processing(asked: ProcessorKwargs, messages: Sequence[Message]) -> str:
    """Return the processor options other than frame sampling as JSON with sorted keys, or "".

    Raises InvalidRequest for image sizes in a chat with videos.
    """
    frames = set() if isinstance(asked, AnyProcessorKwargs) else {*VideoSampling.__struct_fields__}
    options = asked.model_dump(exclude_none=True, exclude=frames)
    if not options:
        return ""
    if frames and any(part.video_url is not None for one in messages for part in one.content or ()):
        raise InvalidRequest(
            f"mm_processor_kwargs: {', '.join(options)} applies to images only, and the chat has videos; "
            f"remove it",
            param="mm_processor_kwargs",
        )
    return msgspec.json.encode(options, order="deterministic").decode()


def wire_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the chat with references for media, and with role "system" for OpenAI's newer "developer".

    If a tool call of a message was cut off, all its calls become text as the model wrote them, because chat
    templates need complete JSON arguments.
    """
    chat = []
    for message in messages:
        content = [
            Part(type=MODALITY_OF[part.type]) if part.text is None else Part(type="text", text=part.text)
            for part in message.content or ()
        ]
        calls = [
            CalledFunction(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ]
        if not all(is_object(call.arguments) for call in calls):
            content, calls = [*content, Part(type="text", text="\n" * bool(content) + HERMES.write(calls))], []
        chat.append(
            ChatMessage(
                role="system" if message.role == "developer" else message.role,
                content=content,
                tool_calls=calls,
                tool_call_id=message.tool_call_id or "",
                name=message.name or "",
                reasoning=message.reasoning_content or message.reasoning or "",
            )
        )
    return chat
