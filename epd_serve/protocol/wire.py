"""Typed msgpack messages between the gateway and the instances, and among instances.

A call stays open while its work runs; closing it cancels the work. All calls from a process to an instance share
one link (:mod:`epd_serve.rpc.messages`).

======================  =========  ====================  ==========================================================
call                    from, to   body                  answer
======================  =========  ====================  ==========================================================
``/stage/encode``       gateway,E  EncodeRequest         EncodeReply once P has the feature
``/stage/prefill``      gateway,P  PrefillRequest        the answer; header ``x-epd-next`` names its next part
``/stage/decode``       gateway,D  DecodeRequest         the answer from the second token on
``/feature/event``      E, P       FeatureEvent          nothing, once P has fetched and verified the feature
``/feature/withdraw``   any, P     FeatureWithdrawn      nothing; only a P on vLLM takes it
``/kv/reserve``         P, D       ReserveRequest        ReserveReply, when blocks are free
``/kv/renew``           P, D       TransferRef           nothing, or 404 when the lease is gone
``/kv/complete``        P, D       Handoff               nothing; D owns the request from here
``/kv/cancel``          P, D       TransferRef           nothing; P announces no more
``/kv/announce``        P, D       KVAnnouncement        KVTaken once D has read KV from P's memory
``/prompt/tokenize``    gateway,P  TokenizeRequest       TokenizeReply
``/prompt/detokenize``  gateway,P  DetokenizeRequest     DetokenizeReply
``/role``               gateway    RoleOrder             RoleChanged once the instance serves that role; 409 during
                                                         another switch, 504 if draining misses the deadline
``/leave``              gateway    LeaveOrder            Left once the instance has drained; 504 if it misses the
                                                         deadline
``/info``               any        nothing               InstanceInfo, as JSON
``/reports``            any        nothing               a stream of Reports, one line of JSON each, until the
                                                         caller closes the call
======================  =========  ====================  ==========================================================

An answer is OpenAI's JSON; a streamed answer is OpenAI's events packed in items (:mod:`epd_serve.rpc.items`).
:mod:`epd_serve.protocol.instance_state` defines state reports and lifecycle orders.
All calls report errors as OpenAI error objects in JSON with a 4xx or 5xx status (:mod:`epd_serve.errors`).
"""

from __future__ import annotations

import math
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
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview, message_type: type[M]) -> M:
    """Decode a message. Raises ``ValueError`` (msgspec.ValidationError) that names the wrong field."""
    return msgspec.msgpack.decode(data, type=message_type)


#: Limits far above any real instance's values and far below overflow of sums and products.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
NumParameters = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


#: Video defaults of most processors: frames per second, (minimum, maximum) frames, maximum pixels of a frame.
USUAL_FPS, USUAL_FRAMES, USUAL_FRAME_PIXELS = 2.0, (4, 768), 768 * 28 * 28
#: An audio tower computes 50 positions per second; one position costs about as much as one image patch.
PIXELS_PER_POSITION = 14 * 14
_POSITIONS_PER_SECOND = 50


class MediaRef(Message, frozen=True):
    """A media item without its bytes.

    Attributes:
        mm_hash: full-width blake3 hex over media bytes, modality, sampling, processing and the model's
            ``media_fingerprint``.
        width, height: displayed size of an image or video frame in pixels (EXIF orientation applied), read from
            the header alone; 0 for audio.
        low_detail: ``width`` and ``height`` are the size to scale the image down to before encoding.
        num_frames, fps, is_list: video facts, as in :class:`~epd_serve.types.VideoFacts`.
        sampling: frames of a video to use.
        processing: processor options other than frame sampling, as JSON, or "".
        num_samples, rate, channels: audio facts, as in :class:`~epd_serve.types.AudioFacts`.
        num_segments: number of independently encoded segments of a video.
        segment: index of this segment, from 0; None for the whole item.
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
        """Return a reference to audio, without an ``mm_hash`` yet."""
        facts = audio.num_samples, audio.rate, audio.channels
        return cls("", 0, 0, "audio", False, 0, 0.0, False, AS_THE_MODEL, *facts)

    @classmethod
    def of_video(cls, video: VideoFacts, sampling: VideoSampling) -> MediaRef:
        """Return a reference to a video, without an ``mm_hash`` yet."""
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
        """Number of video frames fixed by the request; 0 if the model's processor decides."""
        if self.sampling.takes_all_read(self.video):
            return self.sampling.count_read(self.video)
        return self.sampling.processor_num_frames or 0

    @property
    def num_sampled(self) -> int:
        """Number of video frames to encode, assuming the defaults of most processors."""
        if self.num_asked:
            return self.num_asked
        fps = USUAL_FPS if self.sampling.processor_fps is None else self.sampling.processor_fps
        count = min(max(int(self.video.duration_s * fps), USUAL_FRAMES[0]), USUAL_FRAMES[1])
        return min(count, self.num_frames, self.sampling.max_frames or count)

    @property
    def segments(self) -> list[MediaRef]:
        """Segments to encode, in order, each with its own ``mm_hash``; just the item if it is not split."""
        return [self.segment_at(number) for number in range(self.num_segments)]

    def segment_at(self, number: int) -> MediaRef:
        if self.num_segments == 1:
            return self
        name = f"{self.mm_hash} {number}/{self.num_segments}"
        return replace(self, mm_hash=blake3(name.encode()).hexdigest(), segment=number)

    def part_of(self, num_groups: int) -> range:
        """Return which of the video's ``num_groups`` groups of frames belong to this segment.

        Each group belongs to exactly one segment; if a video has fewer groups than segments, some are empty.
        """
        if self.segment is None:
            return range(num_groups)
        start, end = (num_groups * number // self.num_segments for number in (self.segment, self.segment + 1))
        return range(start, end)

    @property
    def num_pictures(self) -> int:
        """Approximate encode work in images; a video tower merges two frames into one."""
        return len(self.part_of(-(-self.num_sampled // 2))) if self.modality == "video" else 1

    @property
    def num_pixels(self) -> int:
        """Approximate encode work in image pixels; the real number depends on how the model resizes."""
        if self.modality == "audio":
            return math.ceil(self.audio.duration_s * _POSITIONS_PER_SECOND) * PIXELS_PER_POSITION
        pixels = self.width * self.height
        return pixels if self.modality == "image" else self.num_pictures * min(pixels, USUAL_FRAME_PIXELS)


class Part(Message, frozen=True):
    """A content part of a message: text, or the next media item, which has the modality ``type``."""

    type: Literal["text"] | Modality
    text: str = ""


class CalledFunction(Message, frozen=True):
    """A tool call in a chat's history; ``arguments`` is a JSON object as text."""

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
    """Options for tokenizing messages or a prompt.

    Attributes:
        add_special_tokens: None adds them to a prompt, as the tokenizer decides, and not to a rendered chat.
        tools, template_kwargs: JSON for the chat template, or "".
        bounds_answer: reduce a max_tokens that exceeds the context instead of rejecting the request.
        cache_salt: only requests with equal salts share cached prefixes.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    tools: str = ""
    template_kwargs: str = ""
    cache_salt: str = ""
    bounds_answer: bool = False


class OutputOptions(Message, frozen=True):
    """Format of the client's answer.

    Attributes:
        kind: chat.completion or text_completion objects.
        id, created, model: repeated in every object.
        first_index: index of the first choice.
        echo: put the prompt before each choice.
        token_ids: send token ids with their text, and the prompt's with the first token.
        for_vllm: JSON object of fields that only vLLM supports (``protocol/openai/generation.py``), or "".
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
#: Header of the ``/stage/prefill`` answer: "decode" if D's bytes follow, "none" if the answer is complete.
NEXT_HEADER = "x-epd-next"


class EncodeRequest(Message, frozen=True):
    """Encode one media item for a request and announce the feature to ``announce_to`` (P's control URL).

    ``traceparent``, here and below, is the W3C header of that name, or "" if the request is not traced.
    """

    request_id: str
    ref: MediaRef
    media: bytes
    announce_to: str
    traceparent: str = ""


class EncodeReply(Message, frozen=True):
    cached: bool


class PrefillRequest(Message, frozen=True):
    """Prefill one request's chat or prompt, with references for media.

    Exactly one of ``messages`` (kind "chat") and ``prompt`` (kind "completion") is set. ``decode_url`` is D's
    control URL, or None if the same instance decodes.

    Attributes:
        max_model_len: D's limit, if D may hold less than P.
        generated: output tokens that the client of a streamed answer already received from a lost instance; the
            answer continues after them. Only for ``sampling.n == 1``.
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
    """Decode a request whose reservation and handoff come from P, before or after this message."""

    request_id: str
    stream: bool
    traceparent: str = ""


class Region(Message, frozen=True):
    """Address of registered memory, for peers.

    A peer on the same host (equal ``host_id``) maps ``/proc/<pid>/fd/<fd>``; any other connects to
    ``host:port``. Port 0 means that the memory is reachable only on its own host.

    Attributes:
        protocol: protocol of Mooncake's Transfer Engine if it moves the bytes, else "". With Mooncake,
            ``host:port`` only serves to check that the region still exists.
        engine_port: port of the Transfer Engine.
        address: start of the memory in its process or on its device.
        identity_address: address of the region's identity, which Mooncake peers read and compare.
        device: type of the device that owns the memory.
        handle: vendor handle that maps the device memory belonging to this region in other processes of the host;
            empty if the region has only its own memory.
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
    """Announce a stored feature: its location and its expected form (design: hash event).

    ``checksum`` is blake3 hex over the bytes, or "" if ``generation`` shows whether they are still valid. The
    source keeps the bytes while the call is open. P refuses a feature that it cannot fetch or that does not match
    the event; E reports this to the gateway, which has the item encoded again.

    Attributes:
        region, offset: location in E's memory; ``region`` is None if the feature is in a store.
        generation: generation of the feature on the device behind the region's handle
            (:mod:`epd_serve.engine.device_features`); 0 if the feature is in the region itself.
        store: name of the store that holds the feature under ``mm_hash``; "" with a region.
        item: the encoded item, from which P derives the expected length; None if E does not know it.
        producer: kind of device and operators that computed it; "" if unknown.
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
    store: str = ""
    item: MediaRef | None = None
    producer: str = ""


class FeatureWithdrawn(Message, frozen=True):
    """Tell P that no instance will send this feature for this request."""

    request_id: str
    mm_hash: str


class KVLayout(Message, frozen=True):
    """Properties that the KV pools of P and D must share; D refuses a reservation with another layout."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    model: str
    state_blocks: int = 0
    """Blocks of a sequence's recurrent state, which follow its token blocks."""


class ReserveRequest(Message, frozen=True):
    """Reserve D's blocks for one request (reserve → announce → complete).

    ``num_prompt_tokens`` counts the tokens whose KV P will announce, ``max_tokens`` the output tokens that may
    follow. ``priority`` is the request's.
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
    """Blocks reserved at D.

    Attributes:
        block_ids: blocks for the prompt, in order, then for its recurrent state.
        num_cached_blocks: number of first blocks whose KV D already has.
        name: name of D's KV memory.
        staged_cells: limit on layers × blocks that D reads at once; None if unlimited.
        maps: D maps the device memory of the request's ``region`` and reads from it directly.
    """

    block_ids: list[int]
    num_cached_blocks: int
    name: str
    staged_cells: int | None = None
    maps: bool = False


class SentKV(Message, frozen=True):
    """KV of one transfer, which P keeps in memory until D answers.

    Attributes:
        block_ids: D's blocks to write it to.
        spans: (offset, bytes) in P's memory, in an order fixed by the layout.
        source_ids: P's blocks on its device, replacing ``spans`` if D maps the device's memory.
    """

    transfer_id: str
    block_ids: list[int]
    spans: list[tuple[int, int]]
    source_ids: list[int] = []


class KVAnnouncement(Message, frozen=True):
    """Announce KV of layers ``first_layer`` ... ``end_layer - 1`` in ``region`` for D to read.

    An announcement without parts only opens the connection.
    """

    region: Region
    first_layer: int
    end_layer: int
    parts: list[SentKV]


class KVTaken(Message, frozen=True):
    """Transfers whose KV D has read; D gave up the others in the announcement."""

    transfer_ids: list[str]


class TransferRef(Message, frozen=True):
    """A transfer to renew or cancel.

    Attributes:
        reason: why the request failed at P; "" if it did not fail.
    """

    transfer_id: str
    request_id: str
    reason: str = ""


class TokenLogprob(Message, frozen=True):
    """Log-probability of a chosen token; ``top`` lists the most likely (token id, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]] = msgspec.field(default_factory=list)


class FirstToken(Message, frozen=True):
    token_id: int
    logprob: TokenLogprob | None = None
    #: "stop" or "length" if the sequence ended with its first token.
    finish_reason: Literal["stop", "length"] | None = None


class Handoff(Message, frozen=True):
    """Hand a request over to D, which has all its KV, including that of ``generated``.

    Attributes:
        position_delta: M-RoPE offset to add to the index of tokens after the prompt.
        max_tokens: limit that P derived from the request and the context.
        first: first token of each of the ``n`` sequences; D continues after it.
        logprobs: log-probabilities of earlier tokens that the client has not received, by index from the first
            prompt token; for the first choice only.
        num_cached_tokens: prompt tokens found in P's prefix cache.
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
    """Encode like :func:`encode`, but in parts, without copying the media's bytes."""
    size = len(request.media)
    if size < 1 << 8:
        return [encode(request)]
    head, found, tail = encode(replace(request, media=b"")).partition(_NO_MEDIA)
    assert found and _NO_MEDIA not in tail, "the message contains the empty media field exactly once"
    length = b"\xc5" + size.to_bytes(2) if size < 1 << 16 else b"\xc6" + size.to_bytes(4)
    return [head + _NO_MEDIA[:-2] + length, request.media, tail]


#: Header of P's answer with a note on the prompt, for logs.
PROMPT_NOTE_HEADER = "x-epd-prompt"


class PromptNote(Message, frozen=True):
    """P's note on a request's prompt; the header holds it as JSON.

    Attributes:
        num_tokens: number of prompt tokens.
        had: indices of the request's items and video segments whose features P already had when the request came.
        num_cached: prompt tokens found in P's prefix cache.
    """

    num_tokens: Count
    had: list[int] = []
    num_cached: Count = 0


class TokenizeRequest(Message, frozen=True):
    """Tokenize a chat or prompt; ``items`` need no ``mm_hash``."""

    items: list[MediaRef]
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    prompting: PromptOptions = PromptOptions()
    with_texts: bool = False


class TokenizeReply(Message, frozen=True):
    """Tokens, and the text of each token if requested."""

    tokens: list[int]
    texts: list[str] | None = None


class DetokenizeRequest(Message, frozen=True):
    tokens: list[int]


class DetokenizeReply(Message, frozen=True):
    text: str
