"""What a request demands of instances, found without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

from epd_serve.routing.policy import Demand

if TYPE_CHECKING:
    from proxy.job import Instances, Job

#: Beginnings of a prompt are hashed at this many characters and at each doubling: a match is at least half of
#: what two prompts have in common.
_FIRST_BEGINNING = 256


async def demand_of(job: Job, instances: Instances) -> Demand:
    """Sizes, and where the policy looks at it, the prompt's beginnings."""
    pieces: list[str] = []
    if instances.policy.uses_prefix:
        texts = _texts(job)
        infos = instances.table.models()
        fingerprint = infos[job.model].media_fingerprint if job.model in infos else ""
        names = iter([(await item.name(fingerprint)).mm_hash for item in job.items])
        pieces = [next(names) if text is None else text for text in texts]
        if isinstance(job.prompt, list):
            pieces = [f"{token} " for token in job.prompt]
    return Demand(
        num_characters=_num_characters(job),
        num_tokens=len(job.prompt) if isinstance(job.prompt, list) else 0,
        num_pixels=sum([item.width * item.height for item in job.items]),
        max_tokens=job.sampling.max_tokens,
        num_sequences=job.sampling.n,
        prefix=beginnings(pieces),
        prefix_characters=sum(map(len, pieces)),
    )


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


def _num_characters(job: Job) -> int:
    if job.messages is None:
        return len(job.prompt) if isinstance(job.prompt, str) else 0
    number = 0
    for message in job.messages:
        number += len(message.role)
        for part in message.content:
            number += len(part.text)
    return number


def _texts(job: Job) -> list[str | None]:
    """Of the prompt in order; None stands for a media item."""
    if job.messages is None:
        return [job.prompt] if isinstance(job.prompt, str) else []
    texts: list[str | None] = []
    for message in job.messages:
        texts.append(message.role)
        texts += [part.text if part.type == "text" else None for part in message.content]
    return texts
