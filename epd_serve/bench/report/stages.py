"""A request's stages as pieces that follow each other, so that they can be laid end to end and added up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from epd_serve.bench.types import StageSpan

#: Where stages overlap, the time belongs to the first of these: P is called at once and waits for the encoder, KV
#: goes to D while P still computes.
_ORDER = ("queue", "encode", "prefill", "kv_transfer", "decode")


def pieces(spans: Sequence[StageSpan]) -> list[tuple[str, float, float]]:
    """(stage, begin, length) in seconds from the request's arrival; no two of them overlap."""
    cuts = sorted({at for span in spans for at in (span.start_s, span.start_s + span.duration_s)})
    found: list[tuple[str, float, float]] = []
    for begin, end in pairwise(cuts):
        covering = [
            span.stage for span in spans if span.start_s <= begin and end <= span.start_s + span.duration_s
        ]
        if not covering:
            continue
        stage = min(covering, key=_rank)
        if found and found[-1][0] == stage and abs(found[-1][1] + found[-1][2] - begin) < 1e-9:
            found[-1] = (stage, found[-1][1], end - found[-1][1])
        else:
            found.append((stage, begin, end - begin))
    return found


def _rank(stage: str) -> tuple[int, str]:
    return (_ORDER.index(stage) if stage in _ORDER else len(_ORDER), stage)
