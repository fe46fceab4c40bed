"""A checked request, the instances that serve it, and its demand as the router sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.protocol.wire import ChatMessage, OutputOptions, PromptOptions
from epd_serve.routing.routes import Demand, Router
from epd_serve.routing.table import InstanceTable
from epd_serve.types import SamplingParams
from proxy.fleet.monitor import Monitor
from proxy.media.loader import MediaItem
from proxy.observe.record import RequestRecord
from proxy.settings import GatewaySettings


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready to be sent to instances.

    ``id`` is unique; ``trace_id`` may be the client's. A chat has ``messages``, a completion ``prompt``.
    ``loop`` runs it.
    """

    id: str
    trace_id: str
    model: str
    output: OutputOptions
    sampling: SamplingParams
    messages: list[ChatMessage] | None
    prompt: str | list[int] | None
    items: list[MediaItem]
    record: RequestRecord
    prompting: PromptOptions
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, kw_only=True)
class Instances:
    """The instances as the gateway uses them."""

    table: InstanceTable
    calls: Mapping[str, StageCalls]
    router: Router
    monitor: Monitor
    settings: GatewaySettings


#: Beginnings of a prompt are hashed at this many characters and at each doubling: a match is at least half of
#: what two prompts have in common.
_FIRST_BEGINNING = 256


async def measure_demand(instances: Instances, job: Job) -> Demand:
    """Return the facts on which a request's route depends, with its beginnings where the router uses them."""
    num_characters = num_tokens = 0
    for message in job.messages or ():
        num_characters += len(message.role) + sum([len(part.text) for part in message.content])
    if isinstance(job.prompt, str):
        num_characters = len(job.prompt)
    elif job.prompt is not None:
        num_tokens = len(job.prompt)
    pieces = await _prompt_pieces(job, instances.table) if instances.router.routes.uses_prefix else []
    return Demand(
        num_characters=num_characters,
        num_tokens=num_tokens,
        num_pixels=sum([item.ref.num_pixels for item in job.items]),
        max_tokens=job.sampling.max_tokens,
        num_sequences=job.sampling.n,
        prefix=_hash_beginnings(pieces) if pieces else (),
        prefix_characters=sum(map(len, pieces)),
    )


async def _prompt_pieces(job: Job, table: InstanceTable) -> list[str]:
    """Return the prompt in pieces, in which media are their names."""
    infos = table.models()
    fingerprint = infos[job.model].media_fingerprint if job.model in infos else ""
    pieces = [job.prompting.cache_salt]
    if isinstance(job.prompt, list):
        return [*pieces, *(f"{token} " for token in job.prompt)]
    if job.prompt is not None:
        return [*pieces, job.prompt]
    items = iter(job.items)
    for message in job.messages or ():
        pieces.append(message.role)
        for part in message.content:
            pieces.append(part.text if part.type == "text" else (await next(items).name(fingerprint)).mm_hash)
    return pieces


def _hash_beginnings(pieces: Iterable[str]) -> tuple[tuple[int, bytes], ...]:
    """Return the hash of each beginning of the prompt with its number of characters, shorter ones first."""
    found: list[tuple[int, bytes]] = []
    hasher, done, mark = blake2b(digest_size=16), 0, _FIRST_BEGINNING
    for piece in pieces:
        left = piece
        while done + len(left) >= mark:
            hasher.update(left[: mark - done].encode(errors="surrogatepass"))
            left, done = left[mark - done :], mark
            found.append((mark, hasher.digest()))
            mark *= 2
        hasher.update(left.encode(errors="surrogatepass"))
        done += len(left)
    return tuple(found)
