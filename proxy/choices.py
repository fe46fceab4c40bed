"""Several choices of one stream that lost its instance: each goes on by itself, and their answers stay one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from epd_serve.protocol.chunks import Usage
from proxy.failover import Tried
from proxy.job import Job
from proxy.progress import Progress
from proxy.several import end, stream_all
from proxy.sink import EventSink

if TYPE_CHECKING:
    from proxy.generation import Generator


def goes_on_apart(job: Job, progress: Progress) -> bool:
    """Whether the choices can go on: not where each event tells the usage of all of them together."""
    return job.sampling.n > 1 and progress.known and not job.output.continuous_usage


async def stream_choices(
    generator: Generator, job: Job, generated: Sequence[list[int]], tried: Tried, sink: EventSink
) -> None:
    """Write the rest of each choice, behind the tokens of it that are ``generated``, and the end of all.

    ``tried`` is what all of them tried together. A choice that has ended says so at once.
    Raises ServeError with the first that fails.
    """
    jobs = [
        msgspec.structs.replace(
            job,
            id=f"{job.id}-{choice}",
            sampling=msgspec.structs.replace(job.sampling, n=1, first_choice=job.sampling.first_choice + choice),
            output=msgspec.structs.replace(job.output, first_index=job.output.first_index + choice),
            generated=tokens,
            tried=tried.split(),
        )
        for choice, tokens in enumerate(generated)
    ]
    usages = await stream_all(generator, jobs, sink)
    end(sink, job.output, Usage(usages[0][0], sum(own for _, own in usages)))
