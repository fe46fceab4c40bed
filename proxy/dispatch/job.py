"""A request as it is run, the instances that it is run on, and its prompt as a router looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.protocol.wire import ChatMessage, OutputOptions, PromptOptions
from epd_serve.routing.routes import Router
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


async def prompt_pieces(job: Job, table: InstanceTable) -> list[str]:
    """The prompt in pieces, in which media are their names, for a router that looks at it."""
    infos = table.models()
    fingerprint = infos[job.model].media_fingerprint if job.model in infos else ""
    names = iter([(await item.name(fingerprint)).mm_hash for item in job.items])
    pieces = [next(names) if text is None else text for text in _texts(job)]
    if isinstance(job.prompt, list):
        pieces = [f"{token} " for token in job.prompt]
    return [job.prompting.cache_salt, *pieces]


def beginnings(pieces: Iterable[str]) -> tuple[tuple[int, bytes], ...]:
    """(characters, hash of all up to there), shorter ones first; no more than the pieces have together."""
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


def _texts(job: Job) -> list[str | None]:
    """Return the texts of the prompt in order; None stands for a media item."""
    if job.messages is None:
        return [job.prompt] if isinstance(job.prompt, str) else []
    texts: list[str | None] = []
    for message in job.messages:
        texts.append(message.role)
        texts += [part.text if part.type == "text" else None for part in message.content]
    return texts
