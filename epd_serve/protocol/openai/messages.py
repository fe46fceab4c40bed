"""Messages of a chat as clients send them, and what they become on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import (
    Integer,
    MessageModel,
    RequestModel,
)
from epd_serve.protocol.openai.tool_format import is_object, written_calls
from epd_serve.protocol.wire import CalledFunction, ChatMessage, Part
from epd_serve.types import AS_THE_MODEL, Modality, VideoSampling

#: Messages of a chat, and parts of all of them together.
MAX_MESSAGES = 2048
MAX_PARTS = 4096
#: Calls of one message.
MAX_CALLS = 128


class MediaSource(msgspec.Struct, frozen=True, kw_only=True):
    """A media item as the request names it; ``param`` is its place in the request, for error messages.

    ``sampling``: the frames of a video that are wanted. ``processing``: as of :func:`processing_of`.
    ``low_detail``: it is to be read scaled down (see :data:`epd_serve.media.LOW_DETAIL_PIXELS`).
    ``format``: of a sound, as the request says it; "": it does not.
    ``raw``: the file itself, where the request has it as it is.
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
        """Whether the request holds the item itself."""
        return self.url[:5].lower() == "data:"


class ImageUrl(MessageModel):
    """``detail`` "low" has the picture scaled down to fit 512x512 pixels; "auto" and "high" leave it as it is."""

    url: str = Field(description="http(s):// or data:image/...;base64.")
    detail: Literal["auto", "high", "low"] | None = Field(None, description="low: scaled down to 512x512 pixels.")


class VideoUrl(MessageModel):
    url: str = Field(description="As of a picture; or data:video/jpeg;base64, and frames with commas between.")


class AudioUrl(MessageModel):
    url: str = Field(description="As of a picture.")


class InputAudio(MessageModel):
    """A file in base64, and what it is."""

    data: str = Field(description="The file in base64.")
    format: Literal["wav", "mp3", "flac", "ogg"] = Field(description="Format of the file.")


class VideoFrames(RequestModel):
    """``num_frames``, and ``fps`` a second; together the fewer of both."""

    num_frames: Integer | None = Field(None, ge=1, lt=1 << 20, description="Frames of a video, evenly spaced.")
    fps: float | None = Field(None, gt=0, le=1000, description="Frames a second.")


class ProcessorKwargs(VideoFrames):
    """``fps`` and ``num_frames`` of a video exclude each other; the model's processor resizes a picture to have
    between ``min_pixels`` and ``max_pixels``."""

    min_pixels: Integer | None = Field(None, ge=1, description="Least pixels of a picture after resizing.")
    max_pixels: Integer | None = Field(None, ge=1, description="Most pixels of a picture after resizing.")


class AnyProcessorKwargs(ProcessorKwargs):
    """Any options for vLLM's processor of the model, which checks those that are not named here."""

    model_config = ConfigDict(extra="allow")


class MediaIoKwargs(RequestModel):
    """The frames that are read of each video, evenly spaced; the first ``num_frames`` of a frame list, whose rate
    is ``fps`` (1 where it is not there)."""

    video: VideoFrames | None = Field(None, description="The frames that are read of each video.")


def video_sampling(reading: MediaIoKwargs | None, processing: ProcessorKwargs | None) -> VideoSampling:
    """Raises InvalidRequest for contradictions."""
    read = None if reading is None else reading.video
    bounds = (None, None) if processing is None else (processing.min_pixels, processing.max_pixels)
    if bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        raise InvalidRequest(
            f"mm_processor_kwargs: min_pixels ({bounds[0]}) is more than max_pixels ({bounds[1]})",
            param="mm_processor_kwargs",
        )
    if processing is not None and processing.num_frames is not None and processing.fps is not None:
        raise InvalidRequest(
            "mm_processor_kwargs: fps and num_frames exclude each other; send one of them",
            param="mm_processor_kwargs",
        )
    return VideoSampling(
        num_frames=None if read is None else read.num_frames,
        fps=None if read is None else read.fps,
        processor_num_frames=None if processing is None else processing.num_frames,
        processor_fps=None if processing is None else processing.fps,
    )


def processing_of(kwargs: ProcessorKwargs | None, messages: Sequence[Message]) -> str:
    """A request's options of the processor besides frames, as JSON with sorted keys; "" where there are none.

    Raises InvalidRequest for bounds of pictures in a chat with videos.
    """
    frames = set() if isinstance(kwargs, AnyProcessorKwargs) else set(VideoFrames.model_fields)
    asked = {} if kwargs is None else kwargs.model_dump(exclude_none=True, exclude=frames)
    if not asked:
        return ""
    if frames and any(part.video_url is not None for one in messages for part in one.content or ()):
        raise InvalidRequest(
            f"mm_processor_kwargs: {', '.join(asked)} goes with pictures, and the chat has videos; leave it out",
            param="mm_processor_kwargs",
        )
    return msgspec.json.encode(asked, order="deterministic").decode()


def _as_url(value: Any) -> Any:
    """Return an object for a bare URL."""
    return {"url": value} if isinstance(value, str) else value


class ContentPart(MessageModel):
    """A part of type T has exactly the field T."""

    type: Literal["text", "image_url", "video_url", "audio_url", "input_audio"] = Field(
        description="The field that the part has."
    )
    text: str | None = Field(None, description="A text.")
    image_url: Annotated[
        ImageUrl | None, BeforeValidator(_as_url, json_schema_input_type=ImageUrl | str | None)
    ] = Field(None, description="A picture.")
    video_url: Annotated[
        VideoUrl | None, BeforeValidator(_as_url, json_schema_input_type=VideoUrl | str | None)
    ] = Field(None, description="A video.")
    audio_url: Annotated[
        AudioUrl | None, BeforeValidator(_as_url, json_schema_input_type=AudioUrl | str | None)
    ] = Field(None, description="A sound by URL.")
    input_audio: InputAudio | None = Field(None, description="A sound as a file.")


def _as_parts(content: Any) -> Any:
    """An empty list is no content: instructor sends one beside ``tool_calls``."""
    if content == []:
        return None
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class FunctionCall(MessageModel):
    """``arguments`` is the text of a JSON object, or its beginning where the call was cut off."""

    name: str = Field(min_length=1, description="Name of the function.")
    arguments: str = Field(description="A JSON object as text.")


class ToolCall(MessageModel):
    id: str = Field(description="By which the tool's message refers to the call.")
    type: Literal["function"] = Field("function", description="All tools are functions.")
    function: FunctionCall = Field(description="The call.")


class Message(MessageModel):
    """``content`` may be left out beside ``tool_calls``, which "assistant" alone may have; "tool" has a
    ``tool_call_id``. ``name``, and an assistant's ``reasoning_content`` (or ``reasoning``), are for chat templates
    that show them."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Author of the message.")
    content: Annotated[
        Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None),
    ] = Field(None, description="A text, or a list of parts.")
    tool_calls: list[ToolCall] | None = Field(
        None, max_length=MAX_CALLS, fail_fast=True, description="Calls that the assistant made."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")
    name: str | None = Field(None, description="For chat templates that show it.")
    reasoning_content: str | None = Field(None, description="For chat templates that show it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    function_call: None = Field(None, description="Send tool_calls instead.")
    audio: None = Field(None, description="Answers are text only.")


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The conversation so far."),
]


def too_many_parts(number: int, param: str) -> InvalidRequest:
    """Return the error of a request with more than :data:`MAX_PARTS` parts over all messages."""
    return InvalidRequest(f"{param}: {number} parts over all messages; at most {MAX_PARTS}", param=param)


def check_messages(messages: Sequence[Message]) -> None:
    """Rules that join several fields. Raises InvalidRequest."""
    num_parts = sum([len(message.content or ()) for message in messages])
    if num_parts > MAX_PARTS:
        raise too_many_parts(num_parts, "messages")
    for i, message in enumerate(messages):
        if (
            message.role == "tool"
            or message.content is None
            or message.tool_calls
            or message.tool_call_id is not None
            or message.reasoning_content is not None
            or message.reasoning is not None
        ):
            _check_message(message, f"messages[{i}]")
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content or ()):
            given = part.text, part.image_url, part.video_url, part.audio_url, part.input_audio
            if getattr(part, part.type) is None or given.count(None) != len(given) - 1:
                place = f"messages[{i}].content[{j}]"
                raise InvalidRequest(
                    f"{place}: a part of type {part.type!r} needs exactly the field {part.type!r}",
                    param=f"{place}.{part.type}",
                )


def _check_message(message: Message, place: str) -> None:
    """The rules for roles; a plain message breaks none."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{place}: only an assistant calls tools", param=f"{place}.tool_calls")
    if message.role != "assistant" and (message.reasoning_content or message.reasoning):
        raise InvalidRequest(f"{place}: only an assistant reasons", param=f"{place}.reasoning_content")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(
            f"{place}.content is required", param=f"{place}.content", code="missing_required_parameter"
        )
    if (message.role == "tool") != (message.tool_call_id is not None):
        raise InvalidRequest(
            f"{place}: a tool message, and no other, has the tool_call_id of the call that it answers",
            param=f"{place}.tool_call_id",
        )


def media_of(
    messages: Sequence[Message], reading: MediaIoKwargs | None = None, kwargs: ProcessorKwargs | None = None
) -> list[MediaSource]:
    """The media items in the order in which the chat shows them. Raises InvalidRequest for contradictions."""
    sampling, processing = AS_THE_MODEL, ""
    if reading is not None or kwargs is not None:
        sampling, processing = video_sampling(reading, kwargs), processing_of(kwargs, messages)
    sources: list[MediaSource] = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content or ()):
            place = f"messages[{i}].content[{j}]"
            if part.image_url is not None:
                param, is_low = f"{place}.image_url.url", part.image_url.detail == "low"
                url = part.image_url.url
                sources.append(MediaSource(url=url, param=param, low_detail=is_low, processing=processing))
            elif part.video_url is not None:
                url, param = part.video_url.url, f"{place}.video_url.url"
                sources.append(
                    MediaSource(url=url, param=param, modality="video", sampling=sampling, processing=processing)
                )
            elif part.audio_url is not None:
                url, param = part.audio_url.url, f"{place}.audio_url.url"
                source = MediaSource(url=url, param=param, modality="audio", processing=processing)
                sources.append(source)
            elif part.input_audio is not None:
                sound, param = part.input_audio, f"{place}.input_audio.data"
                url = f"data:audio/{sound.format};base64,{sound.data}"
                sources.append(
                    MediaSource(url=url, param=param, modality="audio", format=sound.format, processing=processing)
                )
    return sources


_MODALITY_OF: dict[str, Modality] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}


def wire_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """The chat with media as references; "developer" is today's word for "system" in the OpenAI API.

    Calls of a message of which one is cut off become its text, as the model wrote them: a chat template takes
    arguments that are an object.
    """
    chat = []
    for message in messages:
        content = [
            Part(type=_MODALITY_OF[part.type]) if part.text is None else Part(type="text", text=part.text)
            for part in message.content or ()
        ]
        calls = [
            CalledFunction(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ]
        if not all(is_object(call.arguments) for call in calls):
            content, calls = [*content, Part(type="text", text=written_calls(calls, behind=bool(content)))], []
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
