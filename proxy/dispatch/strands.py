"""Several answers that become one: prompts of one request, or choices that lost their instance and go on apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from epd_serve.flow.actions import SplitUp
from epd_serve.protocol.openai import chunks
from epd_serve.protocol.wire import OutputOptions
from proxy.dispatch.forwarding import EventSink
from proxy.dispatch.job import Job
from proxy.http.client import Header

if TYPE_CHECKING:
    from proxy.dispatch.dispatcher import Dispatcher

_END_OF_EVENT = b"\n\n"
_NO_CHOICES = b'"choices":[]'

T = TypeVar("T")


async def stream_several(dispatcher: Dispatcher, jobs: Sequence[Job], sink: EventSink) -> None:
    """Write the events of all jobs to ``sink`` as they come. Raises ServeError with the first that fails."""
    strands = [_Strand(job, sink) for job in jobs]
    await _all(dispatcher.stream(strand.job, strand.sink) for strand in strands)
    _end(sink, jobs[0].output, sum((strand.usage for strand in strands), chunks.Usage(0, 0)))


async def stream_choices(dispatcher: Dispatcher, job: Job, split: SplitUp, sink: EventSink) -> None:
    """Write the rest of each choice, behind the tokens of it that the client has, and the end of all.

    A choice that has ended says so at once. Raises ServeError with the first that fails.
    """
    sampling, output = job.sampling, job.output
    strands = [
        _Strand(
            replace(
                job,
                id=f"{job.id}-{choice}",
                sampling=replace(sampling, n=1, first_choice=sampling.first_choice + choice),
                output=replace(output, first_index=output.first_index + choice),
            ),
            sink,
        )
        for choice in range(len(split.tokens))
    ]
    await _all(
        dispatcher.stream(strand.job, strand.sink, tokens, split.history.split())
        for strand, tokens in zip(strands, split.tokens, strict=True)
    )
    prompt = strands[0].usage
    num_output = sum(strand.usage.completion_tokens for strand in strands)
    _end(sink, output, chunks.Usage(prompt.prompt_tokens, num_output, prompt.cached_tokens))


def _end(sink: EventSink, options: OutputOptions, usage: chunks.Usage) -> None:
    """Write what comes behind the last token."""
    sink.write((chunks.usage_event(options, usage) if options.include_usage else b"") + chunks.DONE)


async def whole_several(dispatcher: Dispatcher, jobs: Sequence[Job]) -> bytes:
    """One answer with the choices of all jobs. Raises ServeError with the first that fails."""
    answers = [msgspec.json.decode(answer) for answer in await _all(dispatcher.whole(job) for job in jobs)]
    usages = [answer["usage"] for answer in answers]
    return msgspec.json.encode(
        {
            **answers[0],
            "choices": [choice for answer in answers for choice in answer["choices"]],
            "usage": sum(map(chunks.Usage.of, usages), chunks.Usage(0, 0)).to_dict(),
        }
    )


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    async def run(one: Awaitable[T]) -> T:
        return await one

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(one)) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class _Strand:
    """One job's stream on its way into the common one, as an Outlet: its usage and end are kept back."""

    def __init__(self, job: Job, into: EventSink) -> None:
        self.job = job
        self.sink = EventSink(self, job.record)
        self.usage = chunks.Usage(0, 0)
        self._into = into

    def start(self, headers: Sequence[Header]) -> None:
        """The common stream has headers of its own."""

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = bytes(data)
        if chunks.DONE in events or _NO_CHOICES in events:
            kept = [event for event in events.split(_END_OF_EVENT) if event and not self._take(event)]
            events = b"".join(event + _END_OF_EVENT for event in kept)
        return self._into.write(events) if events else True

    async def drain(self) -> None:
        await self._into.drain()

    def _take(self, event: bytes) -> bool:
        """Whether the event is for this strand alone."""
        if event + _END_OF_EVENT == chunks.DONE:
            return True
        if _NO_CHOICES not in event:
            return False
        self.usage = chunks.Usage.of(msgspec.json.decode(event.removeprefix(b"data: "))["usage"])
        return True
