"""Send mixed requests in a closed loop and compare each answer with the one from before the fault."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from epd_serve.verify.check import Failed
from epd_serve.verify.client import Client, Reply

T = TypeVar("T")
#: Statuses of a clear error that a fault may cause.
FAULT_STATUSES = (429, 500, 502, 503, 504)


class Outcome(StrEnum):
    IDENTICAL = "identical"
    ERROR = "clear error"
    CANCELLED = "cancelled by the client"
    WRONG = "wrong"
    HANG = "hang"


#: Outcomes unacceptable even during a fault.
BAD = (Outcome.WRONG, Outcome.HANG)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request; requests with equal ``key`` have equal answers.

    Attributes:
        patience_s: the client disconnects after this time; None waits for the answer.
    """

    key: str
    content: Any
    fields: dict[str, Any]
    patience_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one request.

    Attributes:
        detail: the fault, or the status of a clear error.
        seconds: duration of the request.
        ttft_s: time until the first bytes of the answer, if any came.
    """

    outcome: Outcome
    text: str = ""
    detail: str = ""
    seconds: float = 0.0
    ttft_s: float | None = None


def judge(reply: Reply, expected: str | None, *, may_cut: bool = False) -> Result:
    """Return whether an answer is right or a clear error.

    A broken stream must end with an error event, after a correct beginning of the answer. Without ``expected`` any
    complete answer counts as identical. With ``may_cut`` a lost connection is a clear error, because a client sees
    nothing else of a router's death.
    """
    if reply.timed_out:
        return Result(outcome=Outcome.HANG, detail=reply.failure)
    if may_cut and not reply.complete:
        return Result(outcome=Outcome.ERROR, detail="connection lost")
    if not reply.status:
        return Result(outcome=Outcome.WRONG, detail=f"the connection broke without an error: {reply.failure}")
    try:
        if reply.status != 200:
            message = reply.error()
            if reply.status in FAULT_STATUSES and message:
                return Result(outcome=Outcome.ERROR, text=message, detail=f"{reply.status}: {message}")
            return Result(outcome=Outcome.WRONG, detail=f"status {reply.status}: {message[:200]}")
        if reply.is_stream and reply.events and "error" in reply.events[-1] and not reply.done:
            choices = (one for event in reply.events[:-1] for one in event["choices"] if not one["index"])
            begun = "".join(one["delta"].get("content") or "" for one in choices)
            if expected is not None and not expected.startswith(begun):
                return Result(outcome=Outcome.WRONG, text=begun, detail="a broken stream has a wrong beginning")
            return Result(outcome=Outcome.ERROR, text=begun, detail=f"broken stream: {reply.events[-1]['error']}")
        text = " | ".join(map(_said, reply.choices()))
    except Failed as failure:
        return Result(outcome=Outcome.WRONG, detail=str(failure))
    if expected is None or text == expected:
        return Result(outcome=Outcome.IDENTICAL, text=text)
    return Result(outcome=Outcome.WRONG, text=text, detail=f"{text!r} instead of {expected!r}")


def _said(choice: Any) -> str:
    """Return a choice as one text: content, tool calls without their ids, and finish reason."""
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
    return f"{message['content'] or ''}{calls or ''} [{choice['finish_reason']}]"


class Traffic:
    """Clients of one server.

    Attributes:
        expected: answer without faults, by request key.
        deadline_s: time for the complete answer or an error.
        pause_s: a client's wait after an error.
        may_cut: whether a lost connection counts as a clear error.
        results: all judged requests.
    """

    def __init__(self, client: Client, *, deadline_s: float = 60.0, pause_s: float = 2.0) -> None:
        self.client, self.deadline_s, self.pause_s, self.may_cut = client, deadline_s, pause_s, False
        self.expected: dict[str, str] = {}
        self.results: list[tuple[Request, Result]] = []
        self._streaming: set[Reply] = set()

    @property
    def num_streaming(self) -> int:
        """Streams between their first and last event."""
        return sum(bool(one.body) and not one.is_over for one in self._streaming)

    async def ask(self, request: Request) -> Result:
        started_s, reply = time.monotonic(), Reply()
        body = self.client.body(request.content, **request.fields)
        if request.fields.get("stream"):
            self._streaming.add(reply)
        try:
            async with asyncio.timeout(request.patience_s):
                await self.client.send(reply, body, timeout_s=self.deadline_s)
            result = judge(reply, self.expected.get(request.key), may_cut=self.may_cut)
        except TimeoutError:
            result = Result(outcome=Outcome.CANCELLED)
        finally:
            self._streaming.discard(reply)
        ttft_s = None if reply.first_s is None else reply.first_s - started_s
        return replace(result, seconds=time.monotonic() - started_s, ttft_s=ttft_s)

    async def learn(self, requests: Sequence[Request], concurrency: int) -> None:
        """Record the answer to each distinct request. Raises Failed if one gets none."""

        async def one(request: Request) -> None:
            for _ in range(10):  # the server may be busy
                result = await self.ask(replace(request, patience_s=None))
                if result.outcome is not Outcome.ERROR or not result.detail.startswith(("429", "503")):
                    break
                await asyncio.sleep(self.pause_s)
            if result.outcome is not Outcome.IDENTICAL:
                raise Failed(f"{request.key} failed without a fault: {result.detail}")
            self.expected[request.key] = result.text

        await in_parallel(one, {each.key: each for each in requests}.values(), concurrency)

    async def _ask_and_record(self, request: Request) -> None:
        result = await self.ask(request)
        self.results.append((request, result))
        if result.outcome not in (Outcome.IDENTICAL, Outcome.CANCELLED):
            await asyncio.sleep(self.pause_s)

    async def ask_all(self, requests: Sequence[Request], concurrency: int) -> None:
        await in_parallel(self._ask_and_record, requests, concurrency)

    async def ask_until(self, requests: Sequence[Request], concurrency: int, over: asyncio.Event) -> None:
        """Repeat the requests until ``over`` is set."""
        turns = itertools.takewhile(lambda _: not over.is_set(), itertools.cycle(requests))
        await in_parallel(self._ask_and_record, turns, concurrency)

    def outcomes(self) -> Counter[Outcome]:
        return Counter(result.outcome for _, result in self.results)

    def wrong(self) -> list[str]:
        """Return the details of all BAD results."""
        return [f"{one.key}: {result.detail}" for one, result in self.results if result.outcome in BAD]


async def in_parallel(do: Callable[[T], Awaitable[None]], items: Iterable[T], concurrency: int) -> None:
    """Call ``do`` for each item, at most ``concurrency`` at a time. The first exception cancels the rest."""
    remaining = iter(items)

    async def work() -> None:
        for one in remaining:
            await do(one)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
