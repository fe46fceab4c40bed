"""Messages between the gateway and the instances, and among instances: flat, typed, msgpack.

Every call lives as long as the work: closing it cancels the work. All calls of a process to an instance share a
link (:mod:`epd_serve.rpc.messages`).

======================  =========  ====================  ==========================================================
call                    from, to   body                  answer
======================  =========  ====================  ==========================================================
``/stage/encode``       gateway,E  EncodeRequest         EncodeReply once P has the feature
``/stage/prefill``      gateway,P  PrefillRequest        the answer; header ``x-epd-next`` says who goes on
``/stage/decode``       gateway,D  DecodeRequest         the answer from the second token on
``/feature/event``      E, P       FeatureEvent          nothing, once P has fetched and verified the feature
``/feature/withdraw``   any, P     FeatureWithdrawn      nothing; to vLLM's P alone
``/kv/reserve``         P, D       ReserveRequest        ReserveReply, when blocks are free
``/kv/renew``           P, D       TransferRef           nothing, or 404 when the lease is gone
``/kv/complete``        P, D       Handoff               nothing; D owns the request from here
``/kv/cancel``          P, D       TransferRef           nothing; P announces no more
``/kv/announce``        P, D       KVAnnouncement        KVTaken once D has read KV from P's memory
``/prompt/tokenize``    gateway,P  TokenizeRequest       TokenizeReply
``/prompt/detokenize``  gateway,P  DetokenizeRequest     DetokenizeReply
``/role``               gateway    RoleOrder             RoleChanged once the instance serves that role; 409 while
                                                         it is on its way to another, 504 where it could not be
``/leave``              gateway    LeaveOrder            Left once nothing is left of what the instance had; 504
                                                        where that was not so by the deadline
``/info``               any        nothing               InstanceInfo, as JSON
``/reports``            any        nothing               Report after Report, each a line of JSON, until the caller
                                                         closes the call
======================  =========  ====================  ==========================================================

An answer is OpenAI's JSON, or where it is streamed OpenAI's events in items (:mod:`epd_serve.rpc.items`).
What an instance says of itself, and the orders that it takes, are in :mod:`epd_serve.protocol.instance_state`.
Errors of any call are OpenAI error objects as JSON with a 4xx or 5xx status (:mod:`epd_serve.errors`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from epd_serve.types import (
    AS_THE_MODEL,
    AudioFacts,
    Modality,
    SamplingParams,
    VideoFacts,
    VideoSampling,
)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all wire messages."""


M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Message → msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview, message_type: type[M]) -> M:
    """msgpack → message. Raises ``ValueError`` (msgspec.ValidationError) that names the wrong field."""
    return msgspec.msgpack.decode(data, type=message_type)


#: Far beyond what any instance has, and far below where sums and products overflow.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
NumParameters = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


#: By which most processors sample a video and resize its frames: frames a second, their least and greatest number,
#: the most pixels of one.
USUAL_FPS, USUAL_FRAMES, USUAL_FRAME_PIXELS = 2.0, (4, 768), 768 * 28 * 28
#: A tower that listens has 50 positions a second; one is as much work as a patch of a picture.
PIXELS_PER_POSITION = 14 * 14
_POSITIONS_PER_SECOND = 50


class MediaRef(Message, frozen=True):
    """A media item without its bytes.

    Attributes:
        mm_hash: full-width blake3 hex over media bytes, modality, sampling, processing and the model's
            ``media_fingerprint``.
        width, height: pixels as displayed (EXIF orientation applied), read from the header alone; of a video's
            frame; 0 of a sound.
        low_detail: width and height are those to which the picture is scaled down before its encode.
        num_frames, fps, is_list: of a video, as in :class:`~epd_serve.types.VideoFacts`.
        sampling: the frames of a video that are wanted.
        processing: what the request asks of the model's processor beside frames, as JSON; "" for nothing.
        num_samples, rate, channels: of a sound, as in :class:`~epd_serve.types.AudioFacts`.
        num_segments: that a video is encoded in, each by itself.
        segment: the number of the one that this is, from 0; None: the whole item.
    """

    mm_hash: str
    width: int
    height: int
    modality: Modality = "image"
    low_detail: bool = False
    num_frames: int = 0
    fps: float = 0.0
    is_list: bool = False
    sampling: VideoSampling = AS_THE_MODEL
    num_samples: int = 0
    rate: int = 0
    channels: int = 0
    processing: str = ""
    num_segments: int = 1
    segment: int | None = None

    @classmethod
    def of_audio(cls, audio: AudioFacts) -> MediaRef:
        """A sound that has no name yet."""
        facts = audio.num_samples, audio.rate, audio.channels
        return cls("", 0, 0, "audio", False, 0, 0.0, False, AS_THE_MODEL, *facts)

    @classmethod
    def of_video(cls, video: VideoFacts, sampling: VideoSampling) -> MediaRef:
        """A video that has no name yet."""
        facts = video.num_frames, video.fps, video.is_list
        return cls("", video.width, video.height, "video", False, *facts, sampling)

    @property
    def video(self) -> VideoFacts:
        return VideoFacts(self.width, self.height, self.num_frames, self.fps, self.is_list)

    @property
    def audio(self) -> AudioFacts:
        return AudioFacts(self.num_samples, self.rate, self.channels)

    @property
    def num_asked(self) -> int:
        """Frames of a video that the request itself names; 0 where the model's processor decides."""
        if self.sampling.takes_all_read(self.video):
            return self.sampling.count_read(self.video)
        return self.sampling.processor_num_frames or 0

    @property
    def num_sampled(self) -> int:
        """Frames of a video that are encoded, where the model's processor samples as most do."""
        if self.num_asked:
            return self.num_asked
        fps = USUAL_FPS if self.sampling.processor_fps is None else self.sampling.processor_fps
        count = min(max(int(self.video.duration_s * fps), USUAL_FRAMES[0]), USUAL_FRAMES[1])
        return min(count, self.num_frames, self.sampling.max_frames or count)

    @property
    def segments(self) -> list[MediaRef]:
        """The segments that the item is encoded in, in order, by names of their own; the item where it is one."""
        if self.num_segments == 1:
            return [self]
        names = (f"{self.mm_hash} {number}/{self.num_segments}" for number in range(self.num_segments))
        return [
            replace(self, mm_hash=blake3(name.encode()).hexdigest(), segment=number)
            for number, name in enumerate(names)
        ]

    def part_of(self, num_groups: int) -> range:
        """The groups of frames that belong to the segment, of so many of the video: each belongs to one segment.

        Some segments have none where a video has fewer groups.
        """
        if self.segment is None:
            return range(num_groups)
        start, end = (num_groups * number // self.num_segments for number in (self.segment, self.segment + 1))
        return range(start, end)

    @property
    def num_pictures(self) -> int:
        """The item's work for a tower in pictures: towers for videos take two frames for each; about."""
        return len(self.part_of(-(-self.num_sampled // 2))) if self.modality == "video" else 1

    @property
    def num_pixels(self) -> int:
        """The item's work for a tower, in pixels of pictures; about, as each model resizes in its own way."""
        if self.modality == "audio":
            return math.ceil(self.audio.duration_s * _POSITIONS_PER_SECOND) * PIXELS_PER_POSITION
        pixels = self.width * self.height
        return pixels if self.modality == "image" else self.num_pictures * min(pixels, USUAL_FRAME_PIXELS)


class Part(Message, frozen=True):
    """A piece of a message's content: text, or the next media item in order, which is of that modality."""

    type: Literal["text"] | Modality
    text: str = ""


class CalledFunction(Message, frozen=True):
    """A call in a chat's history; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True):
    role: str
    content: list[Part]
    tool_calls: list[CalledFunction] = msgspec.field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


class PromptOptions(Message, frozen=True):
    """The options by which messages or a prompt become tokens.

    Attributes:
        add_special_tokens: None leaves it to the tokenizer for a prompt, and adds none to a rendered chat.
        tools, template_kwargs: JSON for the chat template, or "".
        bounds_answer: a max_tokens beyond the context is cut to its room, not refused.
        cache_salt: requests with another one share no cached prefix with this one; "": all that have none.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    tools: str = ""
    template_kwargs: str = ""
    cache_salt: str = ""
    bounds_answer: bool = False


class OutputOptions(Message, frozen=True):
    """The shape in which the client wants its answer.

    ``kind`` chooses between chat.completion and text_completion objects; ``id``, ``created`` and ``model``
    appear in every object. ``first_index`` is that of the first choice; ``echo`` puts the prompt before each.
    ``token_ids``: the tokens' ids come with their text, those of the prompt with the first.
    ``for_vllm`` is a JSON object of fields that only vLLM has (``protocol/openai/generation.py``), or "".
    """

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    first_index: int = 0
    echo: bool = False
    token_ids: bool = False
    for_vllm: str = ""


REQUEST_ID_HEADER = "x-request-id"
#: Header of ``/stage/prefill``'s answer: "decode" when D's bytes follow, "none" when these are all.
NEXT_HEADER = "x-epd-next"


class EncodeRequest(Message, frozen=True):
    """Encode one media item for a request and announce the feature to ``announce_to`` (P's control URL).

    ``traceparent``, here and below, is W3C's header of that name; "" where the request is in no trace.
    """

    request_id: str
    ref: MediaRef
    media: bytes
    announce_to: str
    traceparent: str = ""


class EncodeReply(Message, frozen=True):
    cached: bool
    num_tokens: int


class PrefillRequest(Message, frozen=True):
    """One request's chat or prompt with media as references.

    Exactly one of ``messages`` (kind "chat") and ``prompt`` (kind "completion") is set. ``decode_url`` is D's
    control URL, or None when the same instance decodes.

    Attributes:
        max_model_len: D's, where it may hold less than P.
        generated: output tokens of a streamed answer that its client has already, from an instance that was lost;
            the answer goes on behind them. Only for ``sampling.n == 1``.
    """

    request_id: str
    output: OutputOptions
    sampling: SamplingParams
    items: list[MediaRef]
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    decode_url: str | None = None
    max_model_len: int | None = None
    generated: list[int] = msgspec.field(default_factory=list)
    prompting: PromptOptions = PromptOptions()
    traceparent: str = ""


class DecodeRequest(Message, frozen=True):
    """Tells D to expect a request: P's reservation and handoff will follow, or have come already."""

    request_id: str
    stream: bool
    traceparent: str = ""


class Region(Message, frozen=True):
    """Registered memory as a peer addresses it.

    A peer on the same host (equal ``host_id``) maps ``/proc/<pid>/fd/<fd>``; any other connects to
    ``host:port``, where port 0 means that this memory is reachable on its own host only.

    Attributes:
        protocol: of Mooncake's Transfer Engine, where that is what moves the bytes: then ``host:port`` only says
            whether the region is still there. Else "".
        engine_port: of the Transfer Engine.
        address: where the memory begins in its process, or on its device.
        identity_address: where the process keeps what the region is, for the engine's peers to compare.
        device: type of the devices whose memory is meant.
        handle: by which their vendor's library maps that memory in other processes of this host, where the region
            itself is memory beside it; empty where there is only this memory.
    """

    name: str
    nbytes: int
    host_id: str
    pid: int
    fd: int
    host: str
    port: int
    protocol: str = ""
    engine_port: int = 0
    address: int = 0
    identity_address: int = 0
    device: str = ""
    handle: bytes = b""


class FeatureEvent(Message, frozen=True):
    """E has put a feature: where it lies and what it must look like (design: hash event).

    ``checksum`` is blake3 hex over the bytes; "" where ``generation`` tells whether they are still there. The
    source keeps them as long as the call lasts. A feature that cannot be fetched, or is not what the event says,
    is refused: E reports that to the gateway, which has it encoded anew.

    Attributes:
        region, offset: where the feature lies in E's memory; region is None where it lies in a store.
        generation: of the feature, on the device behind the region's handle
            (:mod:`epd_serve.engine.device_features`); 0 where it lies in the region itself.
        memory: the memory of that device where its transport reaches it.
        store: name of the store that has it under ``mm_hash``; "" where there is a region.
        item: that was encoded; P knows from it how long the feature must be. None: E does not know.
        producer: kind of device and operators that made it; "": unknown.
    """

    request_id: str
    mm_hash: str
    shape: list[int]
    dtype: str
    nbytes: int
    checksum: str
    region: Region | None = None
    offset: int = 0
    generation: int = 0
    memory: Region | None = None
    store: str = ""
    item: MediaRef | None = None
    producer: str = ""


class FeatureWithdrawn(Message, frozen=True):
    """No instance will send this feature for this request."""

    request_id: str
    mm_hash: str


class KVLayout(Message, frozen=True):
    """The properties that two KV pools must share before bytes may move; else the reservation is refused."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    model: str
    state_blocks: int = 0
    """Blocks of a sequence's recurrent state, which come behind those of its tokens."""


class ReserveRequest(Message, frozen=True):
    """Ask D for the blocks of one request (reserve → announce → complete; idempotent by ``transfer_id``).

    ``num_prompt_tokens`` counts the tokens whose KV will be announced, ``max_tokens`` those that may come after;
    ``priority`` is that of the request's SamplingParams.
    """

    transfer_id: str
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int
    block_hashes: list[bytes]
    layout: KVLayout
    lease_s: float
    region: Region
    priority: int = 0


class ReserveReply(Message, frozen=True):
    """``block_ids`` hold the prompt, in order, then its state; the first ``num_cached_blocks`` already do.

    Attributes:
        name: of D's KV.
        staged_cells: layers × blocks that D can read at once at most; None: no limit.
        maps: D maps the device's memory of the request's ``region``, and reads there.
    """

    block_ids: list[int]
    num_cached_blocks: int
    name: str
    staged_cells: int | None = None
    maps: bool = False


class SentKV(Message, frozen=True):
    """KV of one transfer that lies in P's memory until D has answered.

    Attributes:
        block_ids: of D, into which it belongs.
        spans: (offset, bytes) of it, in an order that is the same for all memory of this layout.
        source_ids: blocks of P on its device, in place of spans where D maps the device's memory.
    """

    transfer_id: str
    block_ids: list[int]
    spans: list[tuple[int, int]]
    source_ids: list[int] = []


class KVAnnouncement(Message, frozen=True):
    """KV in ``region`` for D to read, of layers ``first_layer`` ... ``end_layer - 1``.

    One without parts makes the first contact.
    """

    region: Region
    first_layer: int
    end_layer: int
    parts: list[SentKV]


class KVTaken(Message, frozen=True):
    """The transfers whose KV D has read; it has given up the others."""

    transfer_ids: list[str]


class TransferRef(Message, frozen=True):
    """A transfer that is renewed, cancelled or confirmed.

    Attributes:
        reason: why P cancels, where the request was not simply given up by its client.
    """

    transfer_id: str
    request_id: str
    reason: str = ""


class TokenLogprob(Message, frozen=True):
    """Log-probability of a chosen token and of the most likely ones, best first: (token id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = msgspec.field(default_factory=list)


class FirstToken(Message, frozen=True):
    token_id: int
    logprob: TokenLogprob | None = None
    #: "stop" or "length" where the sequence ended with its first token.
    finish_reason: Literal["stop", "length"] | None = None


class Handoff(Message, frozen=True):
    """All KV is written, that of ``generated`` too; D continues behind ``first`` of each of the ``n`` sequences.

    ``position_delta`` is what M-RoPE adds to the index of a token after the prompt; ``max_tokens`` is the limit
    that P derived from the request and the context. ``logprobs`` are those of earlier tokens that the client has
    not got, by index from the prompt's first; of several choices the first's. ``num_cached_tokens`` of the prompt
    were in P's prefix cache.
    """

    transfer_id: str
    request_id: str
    prompt_ids: list[int]
    position_delta: int
    sampling: SamplingParams
    max_tokens: int
    output: OutputOptions
    first: list[FirstToken]
    generated: list[int] = msgspec.field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = msgspec.field(default_factory=dict)
    num_cached_tokens: int = 0


_NO_MEDIA = b"\xa5media\xc4\x00"


def encode_in_parts(request: EncodeRequest) -> list[bytes]:
    """Encode as :func:`encode` does, in parts: the media's bytes are not copied."""
    size = len(request.media)
    if size < 1 << 8:
        return [encode(request)]
    head, found, tail = encode(replace(request, media=b"")).partition(_NO_MEDIA)
    assert found and _NO_MEDIA not in tail, "a media item has no text of its own in the message"
    length = b"\xc5" + size.to_bytes(2) if size < 1 << 16 else b"\xc6" + size.to_bytes(4)
    return [head + _NO_MEDIA[:-2] + length, request.media, tail]


#: The header of P's note on a prompt beside its answer, for logs.
PROMPT_NOTE_HEADER = "x-epd-prompt"


def write_prompt_note(num_tokens: int, had: Iterable[int], num_cached: int = 0) -> str:
    """The header's value.

    Args:
        num_tokens: tokens of the prompt.
        had: numbers, from 0, of the request's items, and segments of videos, whose features P had before it asked
            for them.
        num_cached: tokens of the prompt in P's prefix cache.
    """
    return f"{num_tokens};{','.join(map(str, had))};{num_cached}"


def read_prompt_note(note: str) -> tuple[int | None, set[int], int]:
    """The arguments of :func:`write_prompt_note`; None, an empty set and 0 for a text that it has not written."""
    number, _, rest = note.partition(";")
    had, _, cached = rest.partition(";")
    return (
        int(number) if number.isdecimal() else None,
        {int(index) for index in had.split(",") if index.isdecimal()},
        int(cached) if cached.isdecimal() else 0,
    )


class TokenizeRequest(Message, frozen=True):
    """Ask for the tokens of a chat or prompt; ``items`` need no name."""

    items: list[MediaRef]
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    prompting: PromptOptions = PromptOptions()
    with_texts: bool = False


class TokenizeReply(Message, frozen=True):
    """``texts`` are those of the single tokens, where they were asked for."""

    tokens: list[int]
    texts: list[str] | None = None


class DetokenizeRequest(Message, frozen=True):
    tokens: list[int]


class DetokenizeReply(Message, frozen=True):
    text: str
