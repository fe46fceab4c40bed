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
    """An image, a sound or a video of a message.

    Attributes:
        mime: as in image/jpeg; its first half names the part's kind.
        data: the bytes; sent as a base64 data URL.
        url: sent unchanged, in place of data.
    """

    mime: str
    data: bytes = field(default=b"", repr=False)
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
    """One request of a workload.

    Attributes:
        index: number in the workload's order, from 0, without gaps; it names the request in all files of a run.
        messages: those that this turn adds; the runner puts the conversation so far before them.
        modality: "text", "image", "audio", "video", or several with "+" in alphabetical order.
        conversation: shared by the turns of one conversation; None for a request of its own.
        turn: number in the conversation, from 0; sent after the turn before it is answered.
        think_s: pause of the user before this turn.
        arrival_s: when to send, in seconds since the first request; traces alone have it.
        fields: fields of the request's JSON body, over the run's own.
    """

    index: int
    messages: tuple[Message, ...]
    max_tokens: int
    workload: str
    modality: str = "text"
    conversation: str | None = None
    turn: int = 0
    think_s: float = 0.0
    arrival_s: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


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


class StageSpan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stage of one request as our gateway saw it: queue, encode (one per item), prefill, kv_transfer, decode.

    Attributes:
        start_s: seconds from the request's arrival at the gateway.
        feature: source of an encode's feature: encoded, store, prefill, recomputed.
    """

    stage: str
    start_s: float
    duration_s: float
    instance: str = ""
    feature: str = ""
    failed: bool = False


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request as measured; a line of records.jsonl. None: the event never came.

    Attributes:
        scheduled_s: when the request was due. In a closed loop: when its user was free. Of a later turn: the
            answer before it plus think_s, or the trace's time if that is later.
        slot_wait_s: the part of sent_s - scheduled_s spent waiting for one of max_concurrency slots. The rest is
            the tester's own delay.
        sent_s: when the tester began to send it. The time to connect comes after sent_s.
        first_chunk_s: the first event of any kind, which AISBench calls the first token.
        first_token_s: the first event with a token: content, reasoning or a tool call that is not empty.
        token_times_s: of each event with a token; behind the first one, an event with empty content counts too (a
            special token, half a character).
        last_event_s: the last token or the finish_reason, whichever came later.
        finish_s: the answer's last byte; of a failure, when it was known.
        num_output_tokens: by the server's usage; without it (has_usage false), the number of events.
        stages: where the server is an epd-serve gateway.
    """

    index: int
    workload: str
    modality: str
    scheduled_s: float
    sent_s: float | None = None
    first_chunk_s: float | None = None
    first_token_s: float | None = None
    token_times_s: list[float] = []
    last_event_s: float | None = None
    finish_s: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
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
    slot_wait_s: float = 0.0
    stages: list[StageSpan] = []

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
    """The limits of a good answer, by default the EPD-Serve paper's (section 4.1). Both must be kept."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


class ClientLoad(msgspec.Struct, kw_only=True):
    """How busy the tester's own process was during a run.

    Attributes:
        wall_s, cpu_s: cpu_s / wall_s near 1 means that the tester is the limit.
        loop_lag_p99_s, loop_lag_max_s: lateness of the event loop's timers.
    """

    wall_s: float
    cpu_s: float
    loop_lag_p99_s: float
    loop_lag_max_s: float


class RunSettings(msgspec.Struct, kw_only=True):
    """Everything that is needed to repeat a run.

    Attributes:
        arrivals: as typed: poisson, constant, gamma:0.5, closed:16, trace.
        rate: requests a second, of poisson, constant and gamma.
        time_scale: factor on a trace's times.
        max_concurrency: of the client; waiting for a slot counts as latency from the scheduled time.
        num_devices: rates and throughput per device are divided by it.
        fields: added to every request's JSON body.
        label: name of the measured deployment in tables.
        versions: of this program, Python, and the server where it states one.
        topology: as our gateway states it, "" elsewhere.
        emulated: the emulated devices, as "emulated h200"; "" where there is none.
    """

    base_url: str
    model: str
    workload: str
    num_requests: int
    seed: int
    arrivals: str
    rate: float | None = None
    time_scale: float = 1.0
    max_concurrency: int | None = None
    slo: SLO = SLO()
    num_devices: int = 1
    num_warmups: int = 0
    timeout_s: float = 600.0
    fields: dict[str, Any] = {}
    label: str = ""
    versions: dict[str, str] = {}
    argv: list[str] = []
    created_unix_s: float = 0.0
    topology: str = ""
    emulated: str = ""


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


class WindowSummary(msgspec.Struct, kw_only=True):
    """The figures of the requests sent in ``[begin_s, end_s)``; those never sent count by their scheduled time.

    Attributes:
        modality: "all" or one of the items'.
        figures: of successes, by name; a name is absent where nothing was measured. In seconds: ttft,
            ttft_scheduled, first_chunk, tpot, itl, e2el, e2el_scheduled, send_lag. In tokens: input_tokens,
            output_tokens. In tokens/s of one request: output_token_throughput, prefill_token_throughput (input
            tokens over TTFT).
        attainment: share of requests that kept both limits, by TTFT from the scheduled time; failures kept none.
        duration_s: from the first request to the last answer; of a stable window its length.
        goodput: requests a second that kept the SLO; effective_throughput: their output tokens a second.
        prefill_token_throughput: input tokens over the sum of all TTFTs, as AISBench has it.
        achieved_rate, planned_rate: requests a second that were sent, and that were to be.
        mean_concurrency, max_concurrency: requests under way.
        stages: seconds of each stage, where the server tells them.
    """

    modality: str
    begin_s: float
    end_s: float
    duration_s: float
    num_requests: int
    num_succeeded: int
    num_failed: int
    failures: dict[str, int]
    figures: dict[str, Distribution]
    attainment: Share
    ttft_attainment: Share
    tpot_attainment: Share
    request_throughput: float
    input_token_throughput: float
    output_token_throughput: float
    total_token_throughput: float
    prefill_token_throughput: float
    goodput: float
    goodput_per_device: float
    effective_throughput: float
    effective_throughput_per_device: float
    achieved_rate: float
    planned_rate: float | None
    mean_concurrency: float
    max_concurrency: int
    total_input_tokens: int
    total_output_tokens: int
    stages: dict[str, Distribution] = {}

    def ms(self, name: str, statistic: str) -> float | None:
        """A statistic of a latency in milliseconds; None where nothing was measured."""
        found = self.figures.get(name)
        return None if found is None else 1e3 * float(getattr(found, statistic))


class Summary(msgspec.Struct, kw_only=True):
    """The figures of a run: a pure function of its settings and records.

    Attributes:
        total, stable: figures of all modalities; stable is None where no window is stable.
        by_modality: as total, for each modality, where there are several.
    """

    total: WindowSummary
    stable: WindowSummary | None
    by_modality: dict[str, WindowSummary]
    stable_by_modality: dict[str, WindowSummary]
    warnings: list[str]
