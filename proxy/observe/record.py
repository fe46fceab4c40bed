"""The record of one request: its spans and what else is known of it, written while it runs and read afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from math import inf

from epd_serve.protocol.wire import REQUEST_ID_HEADER, MediaRef, read_prompt_note
from epd_serve.telemetry.span import TRACEPARENT_HEADER, Span, TraceContext, Value
from epd_serve.types import Modality

#: Stages as a gateway sees them: from the call to the answer, waiting included.
QUEUE, ENCODE, PREFILL, TRANSFER, DECODE = "queue", "encode", "prefill", "kv_transfer", "decode"
#: Where a feature came from: computed by the encoder; found in its store; computed at P, in place of an encoder;
#: there already at P.
ENCODED, STORED, RECOMPUTED, AT_PREFILL = "encoded", "store", "recomputed", "prefill"
STAGES, SOURCES = (QUEUE, ENCODE, PREFILL, TRANSFER, DECODE), (ENCODED, STORED, RECOMPUTED, AT_PREFILL)

_USAGE = re.compile(rb'"usage": ?\{"prompt_tokens": ?(\d+), ?"completion_tokens": ?(\d+)')
_REASON = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
#: Where these may begin, for a search that starts at the end.
_USAGE_AT, _REASONS_AT = b'"usage"', (b'"finish_reason":"', b'"finish_reason": "')
#: More than one event with its finish reason, usage and end.
_TAIL_BYTES = 2048
_REQUEST_ID, _TRACEPARENT = REQUEST_ID_HEADER.encode(), TRACEPARENT_HEADER.encode()


class Pace:
    """The times between the events of one answer."""

    __slots__ = ("_observe", "_since_s")

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._since_s = 0.0

    def mark(self) -> None:
        now_s = time.monotonic()
        if self._since_s:
            self._observe(now_s - self._since_s)
        self._since_s = now_s


class RequestRecord:
    """One request from its arrival to its end. All times are monotonic seconds.

    Attributes:
        endpoint: "chat", "completion" ...
        request_id: as the client may have named it.
        key: name of the API key, never the key.
        status: that of the answer, or one of the gateway's own (proxy/api/endpoint.py); 0 while it runs.
        error: code or type of what went wrong.
        first_s, end_s: of the first token of a streamed answer; of the whole.
        prompt_tokens, output_tokens: None where nobody has told.
        prompt_note: what P said of the prompt (epd_serve/protocol/wire.py).
        modality: of its media: "text" where there are none, "image+video" for both.
        num_media, media_bytes: of its media items, by modality.
        items: mm_hashes of its media items, and of the segments of videos.
        pace: times the events of a streamed answer; None: nobody wants to know.
        spans: its stages, over all attempts, each under its attempt's request id.
        prefill, decode: the instances that did these stages last; None where none did.
        tpot_s: mean time of each output token after the first, of a streamed answer with more than one.
        retries, continuations: attempts after the first, before or after the first token.
    """

    __slots__ = (
        "_before_last",
        "_last",
        "_streams",
        "_traceparent",
        "arrived_s",
        "context",
        "continuations",
        "decode",
        "encode_retries",
        "end_s",
        "endpoint",
        "error",
        "finish_reason",
        "first_s",
        "items",
        "key",
        "media_bytes",
        "modality",
        "model",
        "num_media",
        "output_tokens",
        "pace",
        "pixels",
        "prefill",
        "prompt_note",
        "prompt_tokens",
        "queue_s",
        "request_id",
        "retries",
        "spans",
        "status",
        "streamed",
        "tpot_s",
    )

    def __init__(self, endpoint: str, context: TraceContext, request_id: str, arrived_s: float) -> None:
        self.endpoint = endpoint
        self.context = context
        self._traceparent = context.traceparent
        self.request_id = request_id
        self.arrived_s = arrived_s
        self.key = ""
        self.model = ""
        self.modality = "text"
        self.num_media: dict[Modality, int] = {}
        self.media_bytes: dict[Modality, int] = {}
        self.pixels: tuple[int, ...] = ()
        self.status = 0
        self.error = ""
        self.streamed = False
        self.queue_s = 0.0
        self.first_s: float | None = None
        self.end_s: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.prompt_note = ""
        self.items: list[str] = []
        self.finish_reason = ""
        self.spans: list[Span] = []
        self.prefill: str | None = None
        self.decode: str | None = None
        self.tpot_s: float | None = None
        self.retries = 0
        self.continuations = 0
        self.encode_retries = 0
        self.pace: Pace | None = None
        self._last: bytes | memoryview = b""
        self._before_last: bytes | memoryview = b""
        self._streams: list[tuple[bytes | memoryview, bytes | memoryview, Callable[[], int] | None]] = []

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with which every answer tells of its request."""
        return [(_REQUEST_ID, self.request_id.encode()), (_TRACEPARENT, self._traceparent.encode())]

    # ------------------------------------------------------------------ what the gateway notes

    def queued(self, since_s: float) -> None:
        """The request has waited for its turn until now."""
        now_s = time.monotonic()
        self.queue_s = now_s - since_s
        self.spans.append(Span(QUEUE, self.request_id, since_s, now_s))

    def media(self, items: Sequence[tuple[MediaRef, int]]) -> None:
        """Each item of the request and its bytes, in order."""
        self.pixels = tuple([ref.num_pixels for ref, _ in items])
        for ref, nbytes in items:
            self.media_bytes[ref.modality] = self.media_bytes.get(ref.modality, 0) + nbytes
            self.num_media[ref.modality] = self.num_media.get(ref.modality, 0) + 1
        self.modality = "+".join(sorted(self.num_media)) or "text"

    def begin(self, stage: str, request_id: str, instance: str, item: str = "") -> Span:
        """A stage begins at an instance; ``request_id`` is the attempt's, ``item`` an encode's mm_hash."""
        about: dict[str, Value] = {"instance": instance, "item": item} if item else {"instance": instance}
        span = Span(stage, request_id, time.monotonic(), attributes=about)
        self.spans.append(span)
        return span

    def traceparent(self, span: Span | None = None) -> str:
        """For the instance that is asked for a stage."""
        if span is not None and self.context.sampled:
            return self.context.child(1 + self.spans.index(span)).traceparent
        return self._traceparent

    def attempt_failed(self, request_id: str) -> None:
        """End the attempt's open spans as failed."""
        for span in self.spans:
            if span.request_id == request_id:
                span.end(failed=True)

    def again(self, *, continued: bool) -> None:
        if continued:
            self.continuations += 1
        else:
            self.retries += 1

    def forwarded(self, events: bytes | memoryview) -> None:
        """Events of a streamed answer are on their way to the client."""
        self._before_last, self._last = self._last, events
        if self.pace is not None:
            self.pace.mark()

    def streamed_all(self, count: Callable[[], int] | None) -> None:
        """No more will come of a streamed answer. ``count`` is asked later for its tokens; None: nobody has
        counted. Several prompts add up."""
        self._streams.append((self._before_last, self._last, count))
        self._before_last = self._last = b""

    def answered(self, body: bytes) -> None:
        """The whole answer in one piece."""
        usage = self._read_tail(body[-_TAIL_BYTES:])
        if usage is not None:
            self.prompt_tokens, self.output_tokens = usage

    def _read_tail(self, tail: bytes) -> tuple[int, int] | None:
        """Tokens of prompt and answer, where they are told."""
        reason = _REASON.match(tail, max(0, *[tail.rfind(one) for one in _REASONS_AT]))
        if reason is not None:
            self.finish_reason = reason[1].decode()
        usage = _USAGE.match(tail, max(0, tail.rfind(_USAGE_AT)))
        return None if usage is None else (int(usage[1]), int(usage[2]))

    # ------------------------------------------------------------------ what is read when it is over

    def finish(self, status: int, error: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        """The request is over. What follows of what was noted is found by :meth:`complete`, when there is time."""
        self.status = status
        self.error = error
        self.end_s = clock()

    def complete(self) -> None:
        """Once, after :meth:`finish`."""
        for before, last, count in self._streams:
            usage = self._read_tail(bytes(before[-_TAIL_BYTES:]) + bytes(last[-_TAIL_BYTES:]))
            if count is not None:
                self.output_tokens = (self.output_tokens or 0) + count()
            elif usage is not None:
                self.output_tokens = usage[1]
            if usage is not None:
                self.prompt_tokens = usage[0]
        self._streams.clear()
        assert self.end_s is not None
        if self.first_s is not None and self.output_tokens is not None and self.output_tokens > 1:
            self.tpot_s = (self.end_s - self.first_s) / (self.output_tokens - 1)
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
                    span.attributes["feature"] = ENCODED  # faster than the answer that tells whether it was stored
        if self.prompt_note:
            num_tokens, indexes = read_prompt_note(self.prompt_note)
            had = {item for index, item in enumerate(self.items) if index in indexes}
            if self.prompt_tokens is None:
                self.prompt_tokens = num_tokens
            for span in self.spans:
                if span.attributes.get("feature") == STORED and span.attributes["item"] in had:
                    span.attributes["feature"] = AT_PREFILL

    @property
    def duration_s(self) -> float:
        return (self.end_s or self.arrived_s) - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s
