"""A checked request, and its demand as the router sees it."""

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
    """A checked request, ready to be sent to instances.

    ``id`` is unique. A chat has ``messages``, a completion ``prompt``. ``loop`` runs it.
    """

    id: str
    output: OutputOptions
    sampling: SamplingParams
    messages: list[ChatMessage] | None
    prompt: str | list[int] | None
    items: list[MediaItem]
    record: RequestRecord
    prompting: PromptOptions
    loop: asyncio.AbstractEventLoop


#: Beginnings of a prompt are hashed at this many characters and at each doubling: a match is at least half of
#: what two prompts have in common.
_FIRST_BEGINNING = 256


async def measure_demand(fleet: Fleet, job: Job) -> Demand:
    """Return the facts on which a request's route depends, with its beginnings where the router uses them."""
    num_characters = num_tokens = 0
    for message in job.messages or ():
        num_characters += len(message.role) + sum([len(part.text) for part in message.content])
    if isinstance(job.prompt, str):
        num_characters = len(job.prompt)
    elif job.prompt is not None:
        num_tokens = len(job.prompt)
    pieces = await _prompt_pieces(job, fleet.table) if fleet.router.routes.uses_prefix else []
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
