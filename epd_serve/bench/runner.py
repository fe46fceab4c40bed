"""Sends the requests of a plan, open or closed loop, and records the result of each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import msgspec
import pybase64

from epd_serve.bench.connection import Connections, Exchange
from epd_serve.bench.plan import Chain, Plan
from epd_serve.bench.types import Failure, Item, Media, Message, Record, RunSettings

#: Bodies that lie ready: building one must not delay its sending.
_NUM_READY = 32
_LEAST_IDLE_S = 0.004
_LAG_INTERVAL_S = 0.05


@dataclass(slots=True, eq=False)
class _Pending:
    """A turn that is to be sent; ``history``: the messages of its conversation before it."""

    chain: Chain
    turn: int
    scheduled_s: float
    history: list[dict[str, Any]] = field(default_factory=list)
    slot_wait_s: float = 0.0

    @property
    def item(self) -> Item:
        return self.chain.items[self.turn]


@dataclass(kw_only=True)
class Counters:
    """Counts of the requests that this process has handled; the live line shows them."""

    sent: int = 0
    received: int = 0
    failed: int = 0
    finished: int = 0


class Runner:
    """One process's work on a run.

    Attributes:
        lags_s: lateness of the event loop's timers, taken twenty times a second.
    """

    def __init__(
        self,
        plan: Plan,
        connections: Connections,
        settings: RunSettings,
        *,
        headers: Callable[[int], str],
        on_record: Callable[[Record], None],
        done: Mapping[int, Record] | None = None,
        segment: int = 0,
    ) -> None:
        """``done``: what earlier segments have; it is not sent again. ``headers``: lines for a request's index."""
        self._plan = plan
        self._connections = connections
        self._settings = settings
        self._headers = headers
        self._on_record = on_record
        self._done = done or {}
        self._limit = plan.concurrency or settings.max_concurrency or 1 << 30
        self._segment = segment
        self._waiting: deque[tuple[_Pending, float]] = deque()
        self._next_chains: deque[_Pending] = deque()
        self._ready: dict[int, bytes] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._zero_s = 0.0
        self._stopping = False
        self._broken: Exception | None = None
        self._wake = asyncio.Event()
        self.active: set[Exchange] = set()
        self.counters = Counters()
        self.lags_s: list[float] = []
        self._left = 0

    def now(self) -> float:
        """Seconds on the plan's axis."""
        return perf_counter() - self._zero_s

    @property
    def plan_offset_s(self) -> float:
        """The plan's time at which this segment begins: that of the first request that is still to be sent."""
        if self._plan.concurrency is not None:
            return max((record.finish_s for record in self._done.values()), default=0.0)
        if not self._done:
            return 0.0
        return min((at_s for chain in self._plan.chains if (at_s := self._due_s(chain)) is not None), default=0.0)

    async def run(self) -> bool:
        """Send all requests; return whether all are answered, False after :meth:`stop`.

        Raises what ``on_record`` raised.
        """
        self._left = self._plan.num_items - len(self._done)
        starts = [pending for chain in self._plan.chains if (pending := self._pending(chain)) is not None]
        self._zero_s = perf_counter() - self.plan_offset_s
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(self._watch_lag())
            try:
                await (self._closed_loop(starts) if self._plan.concurrency else self._open_loop(starts))
            finally:
                lag.cancel()
                for timer in self._timers:
                    timer.cancel()
        if self._broken is not None:
            raise self._broken
        return not self._left

    def stop(self) -> None:
        """Send nothing more; what is on its way is awaited."""
        self._stopping = True
        self._wake.set()

    def abandon(self) -> None:
        """Wait for nothing either; what is on its way is left without a record."""
        self.stop()
        self.active.clear()

    # ------------------------------------------------------------------ what is due when

    async def _open_loop(self, starts: list[_Pending]) -> None:
        # A conversation that is gone on with is due later than its first turn was.
        upcoming = deque(sorted(starts, key=lambda pending: pending.scheduled_s))
        while upcoming and not self._stopping:
            pending = upcoming[0]
            wait_s = pending.scheduled_s - self.now()
            if wait_s > _LEAST_IDLE_S and self._make_ready(upcoming):
                await asyncio.sleep(0)
            elif wait_s > 0:
                await self._sleep(wait_s)
            else:
                upcoming.popleft()
                self._due(pending)
                await asyncio.sleep(0)  # many that are due at once must not keep answers from being read
        while not self._is_over():
            await self._sleep(3600.0)

    async def _closed_loop(self, starts: list[_Pending]) -> None:
        assert self._plan.concurrency is not None
        self._next_chains = deque(starts)
        for _ in range(min(self._plan.concurrency, len(starts))):
            self._next_user()
        while not self._is_over():
            idle = self._make_ready(self._next_chains)
            await (asyncio.sleep(0) if idle else self._sleep(3600.0))

    def _next_user(self) -> None:
        if self._next_chains and not self._stopping:
            pending = self._next_chains.popleft()
            pending.scheduled_s = self.now()
            self._due(pending)
            self._wake.set()  # time to build the next bodies

    def _is_over(self) -> bool:
        return (not self._left or self._stopping) and not self.active

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _watch_lag(self) -> None:
        due_s = perf_counter() + _LAG_INTERVAL_S
        while True:
            await asyncio.sleep(due_s - perf_counter())
            now_s = perf_counter()
            self.lags_s.append(max(0.0, now_s - due_s))
            due_s = now_s + _LAG_INTERVAL_S

    # ------------------------------------------------------------------ one request

    def _make_ready(self, upcoming: deque[_Pending]) -> bool:
        """Build one body of those that come next; False where there is nothing to build."""
        if len(self._ready) >= _NUM_READY:
            return False
        for pending in islice(upcoming, _NUM_READY):
            if pending.item.index not in self._ready:
                self._ready[pending.item.index] = self._body(pending)
                return True
        return False

    def _body(self, pending: _Pending) -> bytes:
        return chat_body(pending.item, pending.history, self._settings.model, self._settings.fields)

    def _due(self, pending: _Pending) -> None:
        if self._stopping:
            return
        if len(self.active) >= self._limit:
            self._waiting.append((pending, self.now()))
        else:
            self._send(pending)

    def _send(self, pending: _Pending) -> None:
        item = pending.item
        body = self._ready.pop(item.index, None) or self._body(pending)
        num_bytes = len(body)
        exchange = Exchange(
            self._connections,
            *("POST", CHAT_PATH, self._headers(item.index)),
            lambda done: self._ended(pending, done, num_bytes),
            body,
        )
        self.active.add(exchange)
        self.counters.sent += 1
        self._connections.begin(exchange)

    def _ended(self, pending: _Pending, exchange: Exchange, num_bytes: int) -> None:
        if exchange not in self.active:
            return
        self.active.remove(exchange)
        record = self._record(pending, exchange, num_bytes)
        self._write(record)
        if record.failure is None:
            self._next_turn(pending, record)
        else:
            self._give_up_turns(pending.chain, pending.turn, record.finish_s)
            if self._plan.concurrency is not None:
                self._next_user()
        while self._waiting and len(self.active) < self._limit and not self._stopping:
            waiting, since_s = self._waiting.popleft()
            waiting.slot_wait_s = self.now() - since_s
            self._send(waiting)
        if not self._left or self._stopping:
            self._wake.set()

    def _next_turn(self, pending: _Pending, record: Record) -> None:
        turn = pending.turn + 1
        if turn == len(pending.chain.items):
            if self._plan.concurrency is not None:
                self._next_user()
            return
        follower = self._follower(pending.chain, turn, pending.history, record)
        self._later(max(0.0, follower.scheduled_s - self.now()), follower)

    def _later(self, wait_s: float, pending: _Pending) -> None:
        def call() -> None:
            self._timers.discard(timer)
            self._due(pending)

        timer = asyncio.get_running_loop().call_later(wait_s, call)
        self._timers.add(timer)

    def _give_up_turns(self, chain: Chain, failed: int, at_s: float) -> None:
        for item in chain.items[failed + 1 :]:
            if item.index not in self._done:
                self._write(
                    Record(
                        **_names(item),
                        scheduled_s=at_s,
                        finish_s=at_s,
                        failure=Failure.NOT_SENT,
                        detail=f"turn {failed} failed",
                        segment=self._segment,
                    )
                )

    def _write(self, record: Record) -> None:
        self._left -= 1
        self.counters.finished += 1
        self.counters.failed += record.failure is not None
        self.counters.received += record.first_token_s is not None
        try:
            self._on_record(record)
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._broken = self._broken or error
            self.stop()

    def _record(self, pending: _Pending, exchange: Exchange, num_bytes: int) -> Record:
        answer = exchange.answer
        assert exchange.finish_s is not None
        times = [self._on_plan(at_s) for at_s in answer.token_times_s]
        return Record(
            **_names(pending.item),
            scheduled_s=round(pending.scheduled_s, 6),
            sent_s=self._on_plan(exchange.sent_s),
            first_chunk_s=None if answer.first_chunk_s is None else self._on_plan(answer.first_chunk_s),
            first_token_s=times[0] if times else None,
            token_times_s=times,
            last_event_s=None if answer.last_event_s is None else self._on_plan(answer.last_event_s),
            finish_s=self._on_plan(exchange.finish_s),
            num_prompt_tokens=answer.prompt_tokens,
            num_output_tokens=len(times) if answer.completion_tokens is None else answer.completion_tokens,
            has_usage=answer.completion_tokens is not None,
            num_cached_tokens=answer.cached_tokens,
            finish_reason=answer.finish_reason,
            status=exchange.status or None,
            failure=exchange.failure,
            detail=exchange.detail,
            num_body_bytes=num_bytes,
            text="".join(answer.text),
            slot_wait_s=round(pending.slot_wait_s, 6),
            segment=self._segment,
        )

    def _on_plan(self, at_s: float) -> float:
        return round(at_s - self._zero_s, 6)

    # ------------------------------------------------------------------ conversations, begun or not

    def _first_open(self, chain: Chain) -> int:
        return next(
            (turn for turn, item in enumerate(chain.items) if item.index not in self._done), len(chain.items)
        )

    def _pending(self, chain: Chain) -> _Pending | None:
        """The next turn of a conversation, with its history; None where the conversation is over."""
        turn = self._first_open(chain)
        if turn == len(chain.items):
            return None
        pending = _Pending(chain, 0, chain.at_s or 0.0)
        for before in range(turn):
            record = self._done[chain.items[before].index]
            if record.failure is not None:  # the process ended before it had written down what follows
                self._give_up_turns(chain, before, record.finish_s)
                return None
            pending = self._follower(chain, before + 1, pending.history, record)
        return pending

    def _due_s(self, chain: Chain) -> float | None:
        """The time at which the first turn without a record is due; None where none is left to send."""
        turn = self._first_open(chain)
        if turn == len(chain.items):
            return None
        if not turn:
            return chain.at_s
        record = self._done[chain.items[turn - 1].index]
        return self._turn_due_s(chain, turn, record) if record.failure is None else None

    def _turn_due_s(self, chain: Chain, turn: int, record: Record) -> float:
        """The time at which the turn after ``record`` is due.

        The user thinks first, and the turn is not sent before its planned time.
        """
        item = chain.items[turn]
        planned_s = 0.0 if item.arrival_s is None or chain.at_s is None else item.arrival_s * self._plan.time_scale
        return max(record.finish_s + item.think_s, planned_s)

    def _follower(self, chain: Chain, turn: int, history: list[dict[str, Any]], record: Record) -> _Pending:
        """The turn after ``record``, with that record's answer in the history."""
        answer = {"role": "assistant", "content": record.text}
        history = [*history, *map(wire_message, chain.items[turn - 1].messages), answer]
        return _Pending(chain, turn, self._turn_due_s(chain, turn, record), history)


def _names(item: Item) -> dict[str, Any]:
    return {
        "index": item.index,
        "workload": item.workload,
        "modality": item.modality,
        "conversation": item.conversation,
        "turn": item.turn,
    }


CHAT_PATH = "/v1/chat/completions"
_encoder = msgspec.json.Encoder()
#: Part by what a media type begins with.
_PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def wire_message(message: Message) -> dict[str, Any]:
    """A message as an entry of the request's ``messages``."""
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def chat_body(item: Item, history: Sequence[dict[str, Any]], model: str, fields: Mapping[str, Any]) -> bytes:
    """The JSON of a streamed chat. ``history``: messages and answers before this turn; ``fields`` of the run."""
    body = {
        "model": model,
        "messages": [*history, *map(wire_message, item.messages)],
        "max_tokens": item.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
        **item.fields,
    }
    return _encoder.encode(body)


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _PARTS.get(part.mime.partition("/")[0])
    if kind is None:
        raise ValueError(f"media type {part.mime!r} is none of image/..., audio/... and video/...")
    return {"type": kind, kind: {"url": part.url or _data_url(part)}}


def _data_url(media: Media) -> msgspec.Raw:
    """A data URL, as JSON already: base64 needs no escapes, and a picture is not worth a second pass."""
    return msgspec.Raw(b'"data:%b;base64,%b"' % (media.mime.encode(), pybase64.b64encode(media.data)))
