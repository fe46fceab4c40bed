"""A checked request and its demand for routing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from epd_serve.protocol.wire import ChatMessage, OutputOptions, PromptOptions
from epd_serve.routing.routes import Demand
from epd_serve.routing.table import InstanceTable
from epd_serve.types import SamplingParams
from proxy.fleet import Fleet
from proxy.media.loader import MediaItem
from proxy.observe.record import RequestRecord


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready for instances; a chat has ``messages``, a completion ``prompt``."""

    id: str
    output: OutputOptions
    sampling: SamplingParams
    messages: list[ChatMessage] | None
    prompt: str | list[int] | None
    items: list[MediaItem]
    record: RequestRecord
    prompting: PromptOptions
    loop: asyncio.AbstractEventLoop


#: Prefixes of a prompt are hashed at this length in characters and each doubling, so that a match covers at least
#: half of the common prefix.
_FIRST_PREFIX = 256


async def measure_demand(fleet: Fleet, job: Job) -> Demand:
    """Return what routing needs to know about a request, with prefix hashes if the routing policy uses them."""
    num_characters = num_tokens = 0
    for message in job.messages or ():
        num_characters += len(message.role) + sum([len(part.text) for part in message.content])
    if isinstance(job.prompt, str):
        num_characters = len(job.prompt)
    elif job.prompt is not None:
        num_tokens = len(job.prompt)
    pieces = await _prompt_pieces(job, fleet.table) if fleet.policy.uses_prefix else []
    return Demand(
        num_characters=num_characters,
        num_tokens=num_tokens,
        num_pixels=sum([item.ref.num_pixels for item in job.items]),
        max_tokens=job.sampling.max_tokens,
        num_sequences=job.sampling.n,
        prefix=_hash_prefixes(pieces) if pieces else (),
        prefix_characters=sum(map(len, pieces)),
    )


async def _prompt_pieces(job: Job, table: InstanceTable) -> list[str]:
    """Return the prompt in pieces, with the names of media in their places."""
    infos = table.models()
    fingerprint = infos[job.output.model].media_fingerprint if job.output.model in infos else ""
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


def _hash_prefixes(pieces: Iterable[str]) -> tuple[tuple[int, bytes], ...]:
    """Return pairs of a prefix length in characters and its hash, ascending."""
    found: list[tuple[int, bytes]] = []
    hasher, done, mark = blake2b(digest_size=16), 0, _FIRST_PREFIX
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
