"""Workloads that cost the tester nothing to make: the same text, or pictures of bytes that nobody decodes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from epd_serve.bench.types import Item, Media, Message

_NUM_PICTURES = 64


@dataclass(frozen=True, kw_only=True)
class Plain:
    """``image_bytes`` of 0: text alone. Pictures are random bytes, so that their base64 is as long as a JPEG's."""

    num_items: int
    num_words: int
    max_tokens: int
    image_bytes: int = 0
    name: str = "plain"

    def items(self, seed: int) -> Iterator[Item]:
        rng = random.Random(seed)
        pictures = [Media(mime="image/jpeg", data=rng.randbytes(self.image_bytes)) for _ in range(_NUM_PICTURES)]
        for index in range(self.num_items):
            text = " ".join(f"word{rng.randrange(10_000)}" for _ in range(self.num_words))
            parts = (pictures[index % _NUM_PICTURES], text) if self.image_bytes else (text,)
            yield Item(
                index=index,
                messages=(Message(role="user", parts=parts),),
                max_tokens=self.max_tokens,
                workload=self.name,
                modality="image" if self.image_bytes else "text",
            )
