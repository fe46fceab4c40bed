"""The tokens of a media item in a prompt, from its facts alone: rows of its feature, and text between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from epd_serve.models.family import TRIED_SECONDS, TRIED_SIZES, Family, picture, sound
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import AS_THE_MODEL, MediaSpan, VideoFacts

_MAX_LAYOUTS = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one item, and where among them which rows of its feature lie: (start, length, offset)."""

    ids: list[int]
    runs: list[tuple[int, int, int]]

    def spans(self, start: int, mm_hash: str) -> list[MediaSpan]:
        """The runs of an item whose tokens begin at ``start``."""
        return [MediaSpan(start + begin, length, mm_hash, offset) for begin, length, offset in self.runs]


class MediaLayouts:
    """Layouts of one model's media, the latest of which are kept. Safe for use from several threads."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer that reads an item's text otherwise within a prompt than by itself."""
        self._family = family
        self._tokenizer = tokenizer
        self._of_facts = lru_cache(_MAX_LAYOUTS)(self._new)
        for size in TRIED_SIZES:
            if "image" in family.token_ids:
                self._check(picture(size))
            if "video" in family.token_ids:
                self._check(MediaRef.of_video(VideoFacts(*size, 100, 12.5), AS_THE_MODEL))
        if family.audio is not None:
            for seconds in TRIED_SECONDS:
                self._check(sound(seconds, family.audio.rate))

    def of(self, item: MediaRef) -> Layout:
        """Raises InvalidRequest for an item that the model cannot take."""
        return self._of_facts(replace(item, mm_hash=""))

    def _new(self, item: MediaRef) -> Layout:
        ids: list[int] = []
        runs: list[tuple[int, int, int]] = []
        offset = 0
        for part in self._family.parts_of(item):
            if isinstance(part, str):
                ids += self._read(part)
                continue
            runs.append((len(ids), part, offset))
            ids += [self._family.row_token_ids[item.modality]] * part
            offset += part
        return Layout(ids, runs)

    def _check(self, item: MediaRef) -> None:
        token: str = self._tokenizer.convert_ids_to_tokens(self._family.row_token_ids[item.modality])
        text = "".join(part if isinstance(part, str) else token * part for part in self._family.parts_of(item))
        before, _, after = (self._read(piece) for piece in ("a ", token, " b"))
        ids = self._read(f"a {text} b")
        if ids != [*before, *self.of(item).ids, *after]:
            raise ValueError(
                f"its tokenizer reads the tokens of a media item, {text[:80]!r} ..., otherwise within a text than "
                "by themselves; copy its files from the model"
            )

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
