"""Send scheduled requests in an open or a closed loop and record each result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import pybase64

from epd_serve.bench.client import send
from epd_serve.bench.plan import Conversation, parse_arrivals, schedule_items
from epd_serve.bench.types import Failure, Item, Message, Part, Record, RunSettings

_LAG_INTERVAL_S = 0.05


class Runner:
    """Sends the requests of one run.

    Attributes:
        records: results of the requests that have ended.
        num_sent: requests sent so far.
        lags_s: delays of event-loop timers, sampled twenty times a second.
    """

    def __init__(self, items: Sequence[Item], http: aiohttp.ClientSession, settings: RunSettings) -> None:
        """Raises ValueError for arrivals that do not fit the items."""
        self._arrivals = parse_arrivals(settings)
        self._conversations = schedule_items(items, self._arrivals, settings.seed)
        self._http = http
        self._settings = settings
        self._name = os.urandom(6).hex()
        self._slots = asyncio.Semaphore(settings.max_concurrency or 1 << 30)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._zero_s = 0.0
        self.records: list[Record] = []
        self.num_sent = 0
        self.lags_s: list[float] = [0.0]

    @property
    def num_active(self) -> int:
        return self.num_sent - sum(record.sent_s is not None for record in self.records)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        """Send all requests and wait for their answers, or until :meth:`stop`."""
        self._zero_s = perf_counter()
        lag = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                if self._arrivals.concurrency is None:
                    await self._send_on_schedule(group)
                else:
                    waiting = iter(self._conversations)
                    for _ in range(self._arrivals.concurrency):
                        self._start(group, self._send_in_turn(waiting))
        finally:
            lag.cancel()

    def stop(self) -> None:
        """Send no further request; wait for open ones."""
        self._stopping.set()

    def abandon(self) -> None:
        """Cancel open requests; they get no record."""
        for task in self._tasks:
            task.cancel()

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_on_schedule(self, group: asyncio.TaskGroup) -> None:
        """Open loop: start each conversation at its time, whether or not earlier ones are answered."""
        for conversation in self._conversations:
            at_s = conversation.at_s or 0.0
            body = self._encode_body(conversation.turns[0], [])  # before its time, so that it delays nothing
            if not await self._sleep_until(at_s):
                return
            self._start(group, self._converse(conversation, at_s, body))
            await asyncio.sleep(0)  # send it before encoding the next body

    async def _send_in_turn(self, waiting: Iterator[Conversation]) -> None:
        """Closed loop: one user, who starts the next conversation when the last one has ended."""
        for conversation in waiting:
            if self.is_stopping:
                return
            body = self._encode_body(conversation.turns[0], [])
            await self._converse(conversation, perf_counter() - self._zero_s, body)

    async def _converse(self, conversation: Conversation, scheduled_s: float, body: bytes) -> None:
        history: list[dict[str, Any]] = []
        for turn, item in enumerate(conversation.turns):
            if turn:
                scheduled_s = perf_counter() - self._zero_s + item.think_s
                if conversation.at_s is not None and item.arrival_s is not None:
                    scheduled_s = max(scheduled_s, item.arrival_s * self._arrivals.time_scale)
                body = self._encode_body(item, history)
                if not await self._sleep_until(scheduled_s):
                    return
            record = await self._send(item, body, scheduled_s)
            if record is None:
                return
            self.records.append(record)
            if record.failure is not None:
                self.records += [
                    Record(
                        **_name_fields(later),
                        scheduled_s=record.finish_s,
                        finish_s=record.finish_s,
                        failure=Failure.NOT_SENT,
                        detail=f"turn {turn} failed",
                    )
                    for later in conversation.turns[turn + 1 :]
                ]
                return
            history += [*map(_encode_message, item.messages), {"role": "assistant", "content": record.text}]

    async def _send(self, item: Item, body: bytes, scheduled_s: float) -> Record | None:
        """Send one request; return None if the run stops before a slot is free."""
        since_s = perf_counter()
        name = f"bench-{self._name}-{item.index}"
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "x-request-id": name}
        url = f"{self._settings.base_url}/v1/chat/completions"
        async with self._slots:
            if self.is_stopping:
                return None
            slot_wait_s = perf_counter() - since_s if self._settings.max_concurrency else 0.0
            self.num_sent += 1
            answer = await send(self._http, url, body, headers, self._settings.timeout_s)
        times = [self._since_zero(at_s) for at_s in answer.token_times_s]
        return Record(
            **_name_fields(item),
            scheduled_s=round(scheduled_s, 6),
            sent_s=self._since_zero(answer.sent_s),
            first_chunk_s=None if answer.first_chunk_s is None else self._since_zero(answer.first_chunk_s),
            first_token_s=times[0] if times else None,
            token_times_s=times,
            last_event_s=None if answer.last_event_s is None else self._since_zero(answer.last_event_s),
            finish_s=self._since_zero(answer.finish_s),
            num_prompt_tokens=answer.prompt_tokens,
            num_output_tokens=len(times) if answer.completion_tokens is None else answer.completion_tokens,
            has_usage=answer.completion_tokens is not None,
            num_cached_tokens=answer.cached_tokens,
            finish_reason=answer.finish_reason,
            status=answer.status or None,
            failure=answer.failure,
            detail=answer.detail,
            num_body_bytes=len(body),
            request_id=name,
            text="".join(answer.text),
            slot_wait_s=round(slot_wait_s, 6),
        )

    def _encode_body(self, item: Item, history: Sequence[dict[str, Any]]) -> bytes:
        body = {
            "model": self._settings.model,
            "messages": [*history, *map(_encode_message, item.messages)],
            "max_tokens": item.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings.fields,
            **item.fields,
        }
        return msgspec.json.encode(body)

    def _since_zero(self, at_s: float) -> float:
        return round(at_s - self._zero_s, 6)

    async def _sleep_until(self, at_s: float) -> bool:
        """Sleep until a time of the schedule; return False if the run stops first."""
        if (wait_s := at_s - (perf_counter() - self._zero_s)) > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return not self.is_stopping

    async def _watch_lag(self) -> None:
        while True:
            due_s = perf_counter() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.lags_s.append(max(0.0, perf_counter() - due_s))


def _name_fields(item: Item) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ("index", "workload", "modality", "conversation", "turn")}


def _encode_message(message: Message) -> dict[str, Any]:
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_encode_part(part) for part in message.parts]}


def _encode_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        return part
    kind = f"{part.mime.partition('/')[0]}_url"
    # a data URL as JSON: base64 needs no escapes, which saves a pass over each picture
    url: Any = msgspec.Raw(b'"data:%b;base64,%b"' % (part.mime.encode(), pybase64.b64encode(part.data)))
    return {"type": kind, kind: {"url": part.url or url}}
