"""Data of a run: requests, records, settings and summaries.

All times of a run are seconds since its schedule began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image, a sound or a video of a message: bytes, or a URL that is sent unchanged."""

    mime: str  # as in image/jpeg; its first half names the part's kind
    data: bytes = field(default=b"", repr=False)  # sent as a base64 data URL
    url: str = ""


#: A piece of a message, in the order in which it is sent.
Part = str | Media


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat. A single text is sent as a plain string, all else as a list of parts."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One request of a workload."""

    index: int  # number in the workload's order, from 0, without gaps; it names the request in all files
    messages: tuple[Message, ...]  # those that this turn adds; the runner puts the conversation before them
    max_tokens: int
    workload: str
    modality: str = "text"  # or "image", "audio", "video", or several with "+" in alphabetical order
    conversation: str | None = None  # shared by the turns of one conversation; None for a request of its own
    turn: int = 0  # from 0; sent after the turn before it is answered
    think_s: float = 0.0  # pause of the user before this turn
    arrival_s: float | None = None  # when to send, since the first request; traces alone have it
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the JSON body, over the run's own


class Workload(Protocol):
    """A source of requests."""

    @property
    def name(self) -> str: ...

    @property
    def num_items(self) -> int | None:
        """The number of items; None for an endless workload."""

    def items(self, seed: int) -> Iterator[Item]:
        """Yield the items; the same seed gives the same bytes. Raises ValueError for a file that it cannot use."""


class Failure(StrEnum):
    """Why a request counts as failed."""

    CONNECT = "connect"  # no connection
    CONNECTION_LOST = "connection_lost"  # it ended before an answer began
    HTTP_STATUS = "http_status"  # an answer, but none of 2xx
    TIMEOUT = "timeout"  # not finished within the run's limit
    IN_STREAM_ERROR = "in_stream_error"  # an error event behind a 200
    CUT_STREAM = "cut_stream"  # the connection, or the answer, ended in mid-stream
    NO_FINISH_REASON = "no_finish_reason"  # [DONE] came, but no choice had finished
    NO_TOKENS = "no_tokens"  # it finished, and no token had come
    MALFORMED = "malformed"  # no HTTP, no SSE, no JSON, or JSON that is no chunk
    NOT_SENT = "not_sent"  # a turn behind one that failed


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request as measured; a line of records.jsonl. None: the event never came.

    ``scheduled_s`` of a closed loop is when its user was free; of a later turn, think_s after the answer before
    it, or the trace's time if that is later. Between it and ``sent_s`` lie ``slot_wait_s`` and the tester's own
    delay. Behind the first token, an event with empty content counts as a token too: a special token, or half a
    character.
    """

    index: int
    workload: str
    modality: str
    scheduled_s: float
    slot_wait_s: float = 0.0  # for one of max_concurrency slots
    sent_s: float | None = None  # when the tester began to send; the time to connect comes after it
    first_chunk_s: float | None = None  # the first event of any kind: AISBench's first token
    first_token_s: float | None = None  # the first event with content, reasoning or a tool call
    token_times_s: list[float] = []  # of each event with a token
    last_event_s: float | None = None  # the last token or the finish_reason, whichever came later
    finish_s: float  # the answer's last byte; of a failure, when it was known
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0  # by the server's usage, else the number of events
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
        """Seconds from the send to the first token."""
        return self._since_sent(self.first_token_s)

    @property
    def ttft_scheduled_s(self) -> float | None:
        """Seconds from the scheduled time to the first token: the wait of a user."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def first_chunk_latency_s(self) -> float | None:
        """AISBench's TTFT."""
        return self._since_sent(self.first_chunk_s)

    @property
    def e2el_s(self) -> float | None:
        """Seconds from the send to the generation's last event, or to the answer's end where no event came."""
        return self._since_sent(self._end_s)

    @property
    def e2el_scheduled_s(self) -> float:
        return self._end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token behind the first; None where there is only one."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self._end_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between events with tokens."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def send_lag_s(self) -> float | None:
        """Seconds from the scheduled time to the send: the delay by the tester, or by its limit of concurrency."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def _end_s(self) -> float:
        return self.finish_s if self.last_event_s is None else self.last_event_s

    def _since_sent(self, at: float | None) -> float | None:
        return None if at is None or self.sent_s is None else at - self.sent_s


class SLO(msgspec.Struct, kw_only=True, frozen=True):
    """The limits of a good answer; both must be kept. By default the EPD-Serve paper's (section 4.1)."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


class ClientLoad(msgspec.Struct, kw_only=True):
    """Load of the tester's own process during a run: cpu_s / wall_s near 1 means that it is the limit."""

    wall_s: float
    cpu_s: float
    loop_lag_p99_s: float  # lateness of the event loop's timers
    loop_lag_max_s: float


class RunSettings(msgspec.Struct, kw_only=True):
    """All that is needed to repeat a run."""

    base_url: str
    model: str
    workload: str
    num_requests: int
    seed: int
    arrivals: str  # as typed: poisson, constant, gamma:0.5, closed:16, trace
    rate: float | None = None  # requests a second, of poisson, constant and gamma
    time_scale: float = 1.0  # factor on a trace's times
    max_concurrency: int | None = None  # client slots; the wait for one counts from the scheduled time
    slo: SLO = SLO()
    num_devices: int = 1  # divides the figures per device
    num_warmups: int = 0
    timeout_s: float = 600.0
    fields: dict[str, Any] = {}  # added to every request's JSON body
    label: str = ""  # name of the measured deployment in tables
    versions: dict[str, str] = {}
    argv: list[str] = []
    created_unix_s: float = 0.0
    topology: str = ""  # as our gateway states it
    emulated: str = ""  # the emulated devices, as "emulated h200"


class Distribution(msgspec.Struct, kw_only=True):
    """One figure over requests (ITL: over gaps), in its own unit. Percentiles interpolate linearly."""

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
    """``part`` of ``whole``, with the Wilson interval at 95 %; value is 0 where whole is 0."""

    part: int
    whole: int
    value: float
    low: float
    high: float


class Totals(msgspec.Struct, kw_only=True):
    """The figures of a run, or of its requests of one modality. Rates are per second of ``duration_s``.

    ``figures`` are of successes, by name; a name is absent where nothing was measured. In seconds: ttft,
    ttft_scheduled, first_chunk, tpot, itl, e2el, e2el_scheduled, send_lag. In tokens: input_tokens, output_tokens.
    In tokens/s of one request: output_token_throughput, prefill_token_throughput (input tokens over TTFT).
    """

    duration_s: float  # from the first request to the last answer
    num_requests: int
    num_succeeded: int
    num_failed: int
    failures: dict[str, int]
    figures: dict[str, Distribution]
    attainment: Share  # of requests that kept both limits, by TTFT from the scheduled time; failures kept none
    ttft_attainment: Share
    tpot_attainment: Share
    request_throughput: float
    input_token_throughput: float
    output_token_throughput: float
    total_token_throughput: float
    prefill_token_throughput: float  # input tokens over the sum of all TTFTs, as AISBench has it
    goodput: float  # requests that kept the SLO
    goodput_per_device: float
    effective_throughput: float  # output tokens of the requests that kept the SLO
    effective_throughput_per_device: float
    achieved_rate: float  # requests sent
    planned_rate: float | None  # requests scheduled
    mean_concurrency: float  # requests under way
    max_concurrency: int
    total_input_tokens: int
    total_output_tokens: int

    def ms(self, name: str, statistic: str) -> float | None:
        """Return a statistic of a latency in milliseconds; None where nothing was measured."""
        found = self.figures.get(name)
        return None if found is None else 1e3 * float(getattr(found, statistic))


class Summary(msgspec.Struct, kw_only=True):
    """The figures of a run; ``by_modality`` is empty where there is only one."""

    total: Totals
    by_modality: dict[str, Totals]
    warnings: list[str]
