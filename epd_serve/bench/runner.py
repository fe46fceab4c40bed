"""Send the requests of a plan, open or closed loop, and record the result of each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import pybase64

from epd_serve.bench.client import send
from epd_serve.bench.plan import Chain, Plan
from epd_serve.bench.types import Failure, Item, Media, Message, Record, RunSettings

_LAG_INTERVAL_S = 0.05
#: Part of a message by the first half of its media type.
_PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


class Runner:
    """Sends one plan.

    Attributes:
        records: of the requests that have ended.
        num_sent: requests sent so far.
        lags_s: lateness of the event loop's timers, taken twenty times a second.
    """

    def __init__(self, plan: Plan, http: aiohttp.ClientSession, settings: RunSettings) -> None:
        self._plan = plan
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
        """Requests under way."""
        return self.num_sent - sum(record.sent_s is not None for record in self.records)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        """Send all requests, until all are answered or :meth:`stop` was called."""
        self._zero_s = perf_counter()
        lag = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                if self._plan.concurrency is None:
                    await self._send_on_schedule(group)
                else:
                    chains = iter(self._plan.chains)
                    for _ in range(self._plan.concurrency):
                        self._start(group, self._send_in_turn(chains))
        finally:
            lag.cancel()

    def stop(self) -> None:
        """Send no further request, and wait for those under way."""
        self._stopping.set()

    def abandon(self) -> None:
        """Cancel the requests under way; they get no record."""
        for task in self._tasks:
            task.cancel()

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_on_schedule(self, group: asyncio.TaskGroup) -> None:
        """Open loop: start each conversation at its time, whether or not those before are answered."""
        for chain in self._plan.chains:
            at_s = chain.at_s or 0.0
            body = self._body(chain.items[0], [])  # made before it is due: that must not delay the sending
            if not await self._sleep_until(at_s):
                return
            self._start(group, self._converse(chain, at_s, body))
            await asyncio.sleep(0)  # send it before the next body is made

    async def _send_in_turn(self, chains: Iterator[Chain]) -> None:
        """Closed loop: one user, who begins a conversation when the one before has ended."""
        for chain in chains:
            if self.is_stopping:
                return
            await self._converse(chain, self._now(), self._body(chain.items[0], []))

    async def _converse(self, chain: Chain, scheduled_s: float, body: bytes) -> None:
        history: list[dict[str, Any]] = []
        for turn, item in enumerate(chain.items):
            if turn:
                planned_s = 0.0 if item.arrival_s is None else item.arrival_s * self._plan.time_scale
                scheduled_s = max(self._now() + item.think_s, planned_s if chain.at_s is not None else 0.0)
                body = self._body(item, history)
                if not await self._sleep_until(scheduled_s):
                    return
            record = await self._request(item, body, scheduled_s)
            if record is None:
                return
            self.records.append(record)
            if record.failure is not None:
                self.records += [  # never sent, and failures all the same
                    Record(
                        **_names(later),
                        scheduled_s=record.finish_s,
                        finish_s=record.finish_s,
                        failure=Failure.NOT_SENT,
                        detail=f"turn {turn} failed",
                    )
                    for later in chain.items[turn + 1 :]
                ]
                return
            history += [*map(wire_message, item.messages), {"role": "assistant", "content": record.text}]

    async def _request(self, item: Item, body: bytes, scheduled_s: float) -> Record | None:
        """Send one request; None where the run was stopped before a slot was free."""
        since_s = self._now()
        name = f"bench-{self._name}-{item.index}"
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "x-request-id": name}
        url = f"{self._settings.base_url}/v1/chat/completions"
        async with self._slots:
            if self.is_stopping:
                return None
            slot_wait_s = self._now() - since_s
            self.num_sent += 1
            answer = await send(self._http, url, body, headers, self._settings.timeout_s)
        times = [self._since_zero(at_s) for at_s in answer.token_times_s]
        return Record(
            **_names(item),
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

    def _body(self, item: Item, history: Sequence[dict[str, Any]]) -> bytes:
        return chat_body(item, history, self._settings.model, self._settings.fields)

    def _now(self) -> float:
        return perf_counter() - self._zero_s

    def _since_zero(self, at_s: float) -> float:
        return round(at_s - self._zero_s, 6)

    async def _sleep_until(self, at_s: float) -> bool:
        """Sleep until a time of the plan; False where the run was stopped meanwhile."""
        if (wait_s := at_s - self._now()) > 0:
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


def _names(item: Item) -> dict[str, Any]:
    return {
        "index": item.index,
        "workload": item.workload,
        "modality": item.modality,
        "conversation": item.conversation,
        "turn": item.turn,
    }


def wire_message(message: Message) -> dict[str, Any]:
    """Return a message as an entry of the request's ``messages``."""
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def chat_body(item: Item, history: Sequence[dict[str, Any]], model: str, fields: Mapping[str, Any]) -> bytes:
    """Return the JSON of a streamed chat; ``history``: the conversation so far, ``fields``: those of the run."""
    body = {
        "model": model,
        "messages": [*history, *map(wire_message, item.messages)],
        "max_tokens": item.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
        **item.fields,
    }
    return msgspec.json.encode(body)


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _PARTS[part.mime.partition("/")[0]]
    return {"type": kind, kind: {"url": part.url or _data_url(part)}}


def _data_url(media: Media) -> msgspec.Raw:
    """Return a data URL as JSON: base64 needs no escapes, which saves a pass over each picture."""
    return msgspec.Raw(b'"data:%b;base64,%b"' % (media.mime.encode(), pybase64.b64encode(media.data)))
