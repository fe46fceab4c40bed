"""Data of a run: requests, records, settings and summaries. Times are seconds since the schedule began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image, sound or video of a message, as bytes or as a URL to send unchanged."""

    mime: str  # such as image/jpeg; its first half names the kind of part
    data: bytes = field(default=b"", repr=False)  # sent as a base64 data URL
    url: str = ""


#: A text, a media item, or a part in OpenAI's chat format, sent unchanged.
Part = str | Media | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message. A single text is sent as a string, anything else as a list of parts."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One request of a workload."""

    index: int  # position in the workload, from 0; identifies the request in all files
    messages: tuple[Message, ...]  # messages that this turn adds to the conversation
    max_tokens: int
    workload: str
    modality: str = "text"  # or "image", "audio", "video", or several joined by "+" in alphabetical order
    conversation: str | None = None  # name shared by the turns of one conversation; None for a single request
    turn: int = 0  # each turn is sent after the answer to the one before
    think_s: float = 0.0  # the user's pause before this turn
    arrival_s: float | None = None  # a trace's time, since its first request
    fields: Mapping[str, Any] = field(default_factory=dict)  # JSON fields that override the run's


class Workload(Protocol):
    """A source of requests."""

    @property
    def name(self) -> str: ...

    @property
    def num_items(self) -> int | None:
        """Number of items; None if endless."""

    def items(self, seed: int) -> Iterator[Item]:
        """Yield the items; the same seed gives the same bytes."""


class Failure(StrEnum):
    """Why a request counts as failed."""

    CONNECT = "connect"  # no connection
    CONNECTION_LOST = "connection_lost"  # the connection closed before the answer
    HTTP_STATUS = "http_status"  # a status other than 2xx
    TIMEOUT = "timeout"  # not finished within the run's limit
    IN_STREAM_ERROR = "in_stream_error"  # an error event after a 200
    CUT_STREAM = "cut_stream"  # the connection or the answer ended in mid-stream
    NO_FINISH_REASON = "no_finish_reason"  # [DONE] before every choice had finished
    NO_TOKENS = "no_tokens"  # finished without a token
    MALFORMED = "malformed"  # not HTTP, server-sent events, JSON or a chunk
    NOT_SENT = "not_sent"  # an earlier turn failed


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measured request; a line of records.jsonl. A time is None if its event never came.

    In a closed loop ``scheduled_s`` is the moment its user was free; for a later turn it is ``think_s`` after the
    previous answer, or the trace's time if later. ``sent_s`` comes ``slot_wait_s`` and the tester's own delay
    later. After the first token, an event with empty content counts as a token (a special token, or half a
    character).
    """

    index: int
    workload: str
    modality: str
    scheduled_s: float
    slot_wait_s: float = 0.0  # wait for one of max_concurrency slots; 0 without a limit
    sent_s: float | None = None  # sending began; connecting follows
    first_chunk_s: float | None = None  # first event of any kind: AISBench's first token
    first_token_s: float | None = None  # first event with content, reasoning or a tool call
    token_times_s: list[float] = []  # times of all events with a token
    last_event_s: float | None = None  # the last token or the finish_reason, whichever came later
    finish_s: float  # the answer's last byte, or when a failure was known
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0  # from the server's usage, else counted events
    has_usage: bool = False
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    failure: Failure | None = None
    detail: str = ""
    conversation: str | None = None
    turn: int = 0
    num_body_bytes: int = 0
    request_id: str = ""
    text: str = ""

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        return self._since_sent(self.first_token_s)

    @property
    def ttft_scheduled_s(self) -> float | None:
        """Seconds from the scheduled time to the first token, as a user would wait."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def first_chunk_latency_s(self) -> float | None:
        """AISBench's TTFT."""
        return self._since_sent(self.first_chunk_s)

    @property
    def e2el_s(self) -> float | None:
        """Seconds from sending to the last event, or to the end of an answer without events."""
        return self._since_sent(self._end_s)

    @property
    def e2el_scheduled_s(self) -> float:
        return self._end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self._end_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events with tokens."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def send_lag_s(self) -> float | None:
        """Seconds from the scheduled time to sending: the tester's delay, or the wait for a slot."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.num_prompt_tokens / self.ttft_s if self.ttft_s and self.num_prompt_tokens is not None else None

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.num_output_tokens / self.e2el_s if self.e2el_s else None

    @property
    def _end_s(self) -> float:
        return self.finish_s if self.last_event_s is None else self.last_event_s

    def _since_sent(self, at: float | None) -> float | None:
        return None if at is None or self.sent_s is None else at - self.sent_s


class SLO(msgspec.Struct, kw_only=True, frozen=True):
    """The limits of a good answer; the defaults are the EPD-Serve paper's (section 4.1)."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


class ClientLoad(msgspec.Struct, kw_only=True):
    """Load of the tester's own process; if cpu_s / wall_s is near 1, the tester is the limit."""

    wall_s: float
    cpu_s: float
    loop_lag_p99_s: float  # delay of event-loop timers
    loop_lag_max_s: float


class RunSettings(msgspec.Struct, kw_only=True):
    """Everything needed to repeat a run."""

    base_url: str
    model: str
    workload: str
    num_requests: int
    seed: int
    arrivals: str  # as typed: poisson, constant, gamma:0.5, closed:16, trace
    rate: float | None = None  # requests per second, for poisson, constant and gamma
    duration_s: float | None = None  # replaces num_requests at each rate
    time_scale: float = 1.0  # factor on a trace's times
    max_concurrency: int | None = None  # client slots; waiting for one counts as latency
    slo: SLO = SLO()
    num_devices: int = 1  # divisor of the figures per device
    num_warmups: int = 0
    timeout_s: float = 600.0
    fields: dict[str, Any] = {}  # added to every request's JSON body
    label: str = ""  # name of the deployment in tables
    versions: dict[str, str] = {}
    argv: list[str] = []
    created_unix_s: float = 0.0
    topology: str = ""  # reported by an epd-serve gateway
    emulated: str = ""  # emulated devices, such as "emulated h200"


class Distribution(msgspec.Struct, kw_only=True):
    """One figure over all requests (ITL: over gaps). Percentiles interpolate linearly."""

    n: int
    mean: float
    std: float
    min: float
    max: float
    median: float
    p75: float
    p90: float
    p95: float
    p99: float


class Share(msgspec.Struct, kw_only=True):
    """``part`` of ``whole`` with its 95 % Wilson interval; ``value`` is 0 if ``whole`` is 0."""

    part: int
    whole: int
    value: float
    low: float
    high: float


class Totals(msgspec.Struct, kw_only=True):
    """The figures of a run, or of its requests of one modality. Rates are per second of ``duration_s``.

    ``figures`` cover successful requests; unmeasured ones are absent. In seconds: ttft, ttft_scheduled,
    first_chunk, tpot, itl, e2el, e2el_scheduled, send_lag. In tokens: input_tokens, output_tokens. In tokens/s of
    one request: output_token_throughput, prefill_token_throughput (input tokens / TTFT).
    """

    duration_s: float  # from the first request to the last answer
    num_requests: int
    num_succeeded: int
    num_failed: int
    failures: dict[str, int]
    figures: dict[str, Distribution]
    attainment: Share  # requests that kept both limits, with TTFT from the scheduled time
    ttft_attainment: Share
    tpot_attainment: Share
    request_throughput: float
    input_token_throughput: float
    output_token_throughput: float
    total_token_throughput: float
    prefill_token_throughput: float  # input tokens / sum of all TTFTs, as in AISBench
    goodput: float  # requests that kept the SLO
    goodput_per_device: float
    effective_throughput: float  # output tokens of requests that kept the SLO
    effective_throughput_per_device: float
    achieved_rate: float  # requests sent
    planned_rate: float | None  # requests scheduled
    mean_concurrency: float  # open requests
    max_concurrency: int
    total_input_tokens: int
    total_output_tokens: int

    def ms(self, name: str, statistic: str) -> float | None:
        """Return a statistic of a latency in milliseconds; None if unmeasured."""
        found = self.figures.get(name)
        return None if found is None else 1e3 * float(getattr(found, statistic))


class Summary(msgspec.Struct, kw_only=True):
    """The figures of a run; ``by_modality`` is empty if there is only one."""

    total: Totals
    by_modality: dict[str, Totals]
    warnings: list[str]
