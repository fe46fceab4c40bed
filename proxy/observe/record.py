"""The record of one request: written while it runs, read when it has finished."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

import msgspec

from epd_serve.protocol.wire import REQUEST_ID_HEADER, MediaRef, PromptNote
from epd_serve.telemetry.span import TRACEPARENT_HEADER, Span, TraceContext, Value
from epd_serve.types import Modality

#: Stages as seen by the gateway: from call to answer, including waiting.
QUEUE, ENCODE, PREFILL, TRANSFER, DECODE = "queue", "encode", "prefill", "kv_transfer", "decode"
#: Sources of a feature: computed by the encoder; in its store; computed at P instead; already at P.
ENCODED, STORED, RECOMPUTED, AT_PREFILL = "encoded", "store", "recomputed", "prefill"
STAGES, SOURCES = (QUEUE, ENCODE, PREFILL, TRANSFER, DECODE), (ENCODED, STORED, RECOMPUTED, AT_PREFILL)

_USAGE = re.compile(
    rb'"usage": ?\{"prompt_tokens": ?(\d+), ?"completion_tokens": ?(\d+)'
    rb'(?:, ?"total_tokens": ?\d+, ?"prompt_tokens_details": ?\{"cached_tokens": ?(\d+))?'
)
_REASON = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
#: Literal beginnings of the two patterns, to search from the end.
_USAGE_AT, _REASONS_AT = b'"usage"', (b'"finish_reason":"', b'"finish_reason": "')
#: More than the last events with finish reason, usage and end.
_TAIL_BYTES = 2048
_REQUEST_ID, _TRACEPARENT = REQUEST_ID_HEADER.encode(), TRACEPARENT_HEADER.encode()


class Pace(msgspec.Struct, eq=False):
    """Observes the times between the events of one answer."""

    _observe: Callable[[float], None]
    _since_s: float = 0.0

    def mark(self) -> None:
        now_s = time.monotonic()
        if self._since_s:
            self._observe(now_s - self._since_s)
        self._since_s = now_s


class RequestRecord(msgspec.Struct, eq=False):
    """One request from arrival to end. All times are monotonic seconds.

    Attributes:
        endpoint: "chat", "completion" ...
        request_id: the client's id, or a generated one.
        traceparent: header of ``context`` for callees.
        key: name of the API key, never the key.
        modality: "text" without media, "image+video" for both.
        status: HTTP status, or an internal one (proxy/api/endpoint.py); 0 while it runs.
        error: code or type of the error.
        ttft_s: time from arrival to the first token of a streamed answer.
        tpot_s: mean time per output token after the first, for streamed answers.
        cached_tokens: prompt tokens in P's prefix cache.
        prompt_note: P's note on the prompt (epd_serve/protocol/wire.py).
        items: mm_hashes of all media items and video segments.
        spans: the stages of all attempts, each with its attempt's request id.
        prefill, decode: the last instances of these stages.
        retries, continuations: further attempts before and after the first token.
        pace: times the events of a sampled answer.
    """

    endpoint: str
    context: TraceContext
    request_id: str
    arrived_s: float
    traceparent: str = ""
    key: str = ""
    model: str = ""
    modality: str = "text"
    num_media: dict[Modality, int] = {}
    media_bytes: dict[Modality, int] = {}
    pixels: tuple[int, ...] = ()
    status: int = 0
    error: str = ""
    streamed: bool = False
    queue_s: float = 0.0
    ttft_s: float | None = None
    end_s: float | None = None
    duration_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    prompt_note: str = ""
    items: list[str] = []
    finish_reason: str = ""
    spans: list[Span] = []
    prefill: str | None = None
    decode: str | None = None
    tpot_s: float | None = None
    retries: int = 0
    continuations: int = 0
    encode_retries: int = 0
    pace: Pace | None = None
    _last: bytes | memoryview = b""
    _before_last: bytes | memoryview = b""
    #: The last two events of each answer, and its tokens, if known.
    _answers: list[tuple[bytes | memoryview, bytes | memoryview, int | None]] = []

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that identify the request."""
        return [(_REQUEST_ID, self.request_id.encode()), (_TRACEPARENT, self.traceparent.encode())]

    def queued(self, since_s: float) -> None:
        """Record that the request waited in the queue until now."""
        now_s = time.monotonic()
        self.queue_s = now_s - since_s
        self.spans.append(Span(QUEUE, self.request_id, since_s, now_s))

    def media(self, items: Sequence[tuple[MediaRef, int]]) -> None:
        """Record each media item and its size, in order."""
        self.pixels = tuple([ref.num_pixels for ref, _ in items])
        for ref, nbytes in items:
            self.media_bytes[ref.modality] = self.media_bytes.get(ref.modality, 0) + nbytes
            self.num_media[ref.modality] = self.num_media.get(ref.modality, 0) + 1
        self.modality = "+".join(sorted(self.num_media)) or "text"

    def begin(self, stage: str, request_id: str, instance: str, item: str = "") -> Span:
        """Begin a stage at an instance; ``request_id`` is the attempt's, ``item`` an encode's mm_hash."""
        about: dict[str, Value] = {"instance": instance, "item": item} if item else {"instance": instance}
        span = Span(stage, request_id, time.monotonic(), attributes=about)
        self.spans.append(span)
        return span

    def forwarded(self, events: bytes | memoryview) -> None:
        """Record events, or a whole answer, on the way to the client."""
        self._before_last, self._last = self._last, events
        if self.pace is not None:
            self.pace.mark()

    def end_answer(self, num_tokens: int | None) -> None:
        """Record the end of an answer; ``num_tokens`` if known. Several prompts add up."""
        self._answers.append((self._before_last, self._last, num_tokens))
        self._before_last = self._last = b""

    def complete(self) -> None:
        """Derive durations, counts and sources; call once, after the end."""
        assert self.end_s is not None
        self.duration_s = self.end_s - self.arrived_s
        for before, last, num_tokens in self._answers:
            tail = bytes(before[-_TAIL_BYTES:]) + bytes(last[-_TAIL_BYTES:])
            reason = _REASON.match(tail, max(0, *[tail.rfind(one) for one in _REASONS_AT]))
            if reason is not None:
                self.finish_reason = reason[1].decode()
            usage = _USAGE.match(tail, max(0, tail.rfind(_USAGE_AT)))
            if num_tokens is not None:
                self.output_tokens = (self.output_tokens or 0) + num_tokens
            elif usage is not None:
                self.output_tokens = int(usage[2])
            if usage is not None:
                self.prompt_tokens = int(usage[1])
                self.cached_tokens = int(usage[3]) if usage[3] else None
        self._answers.clear()
        if self.ttft_s is not None and self.output_tokens is not None and self.output_tokens > 1:
            self.tpot_s = (self.duration_s - self.ttft_s) / (self.output_tokens - 1)
        for span in self.spans:
            name = span.name
            if name == PREFILL:
                self.prefill = str(span.attributes["instance"])
            elif name in (TRANSFER, DECODE):
                self.decode = str(span.attributes["instance"])
            if span.end_s == inf:
                span.end_s = self.end_s
                if self.status != 200:
                    span.attributes["failed"] = True
                elif name == ENCODE:
                    span.attributes["feature"] = ENCODED  # the encoder's answer came after P used the feature
        note = None
        if self.prompt_note:
            with suppress(ValueError):  # of an instance of another version
                note = msgspec.json.decode(self.prompt_note, type=PromptNote)
        if note is not None:
            had = {item for index, item in enumerate(self.items) if index in note.had}
            if self.prompt_tokens is None:
                self.prompt_tokens = note.num_tokens
            if self.cached_tokens is None:
                self.cached_tokens = note.num_cached
            for span in self.spans:
                if span.attributes.get("feature") == STORED and span.attributes["item"] in had:
                    span.attributes["feature"] = AT_PREFILL
