"""Merge the answers to several prompts of one completion."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from epd_serve.protocol.openai import chunks
from proxy.fleet import Fleet
from proxy.http.client import Header
from proxy.serving.forwarding import EventSink
from proxy.serving.job import Job
from proxy.serving.serve import serve_stream, serve_whole
from proxy.tasks import run_all

_END_OF_EVENT = b"\n\n"
_NO_CHOICES = b'"choices":[]'


async def stream_several(fleet: Fleet, jobs: Sequence[Job], sink: EventSink) -> None:
    """Write the events of all jobs to ``sink`` as they come. Raises the first ServeError."""
    strands = [_Strand(job, sink) for job in jobs]
    await run_all(serve_stream(fleet, strand.job, strand.sink) for strand in strands)
    usage, options = sum((strand.usage for strand in strands), chunks.Usage(0, 0)), jobs[0].output
    sink.write((chunks.usage_event(options, usage) if options.include_usage else b"") + chunks.DONE)


async def whole_several(fleet: Fleet, jobs: Sequence[Job]) -> bytes:
    """Return one answer with the choices of all jobs. Raises the first ServeError."""
    bodies = await run_all(serve_whole(fleet, job) for job in jobs)
    answers = [msgspec.json.decode(body) for body in bodies]
    usages = [answer["usage"] for answer in answers]
    return msgspec.json.encode(
        {
            **answers[0],
            "choices": [choice for answer in answers for choice in answer["choices"]],
            "usage": sum(map(chunks.Usage.of, usages), chunks.Usage(0, 0)).to_dict(),
        }
    )


class _Strand:
    """The Outlet of one job: writes into the shared stream, except for its usage and end."""

    def __init__(self, job: Job, into: EventSink) -> None:
        self.job = job
        self.sink = EventSink(self, job.record)
        self.usage = chunks.Usage(0, 0)
        self._into = into

    def start(self, headers: Sequence[Header]) -> None:
        """Do nothing: the shared stream has its own headers."""

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = bytes(data)
        if chunks.DONE in events or _NO_CHOICES in events:
            kept = [event for event in events.split(_END_OF_EVENT) if event and not self._keep(event)]
            events = b"".join(event + _END_OF_EVENT for event in kept)
        return self._into.write(events) if events else True

    async def drain(self) -> None:
        await self._into.outlet.drain()

    def _keep(self, event: bytes) -> bool:
        """Return whether the event is the usage or the end, and keep the usage."""
        if event + _END_OF_EVENT == chunks.DONE:
            return True
        if _NO_CHOICES not in event:
            return False
        self.usage = chunks.Usage.of(msgspec.json.decode(event.removeprefix(b"data: "))["usage"])
        return True
