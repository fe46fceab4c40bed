"""Content hashes of KV blocks: equal hash, equal KV."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

from epd_serve.types import MediaSpan

_ROOT = b"epd-serve kv block 1"


def hash_blocks(token_ids: Sequence[int], block_size: int, spans: Sequence[MediaSpan] = ()) -> list[bytes]:
    """Hash each *full* block of a prompt, chained to its predecessors.

    Placeholder tokens are equal for all images, so a block that overlaps a span also hashes the span's mm_hash
    and where in the span the block begins.

    Returns:
        One 32-byte digest for each of the ``len(token_ids) // block_size`` full blocks.
    """
    hashes: list[bytes] = []
    parent = _ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        hasher = blake3(parent)
        hasher.update(array("q", token_ids[start:end]).tobytes())
        for span in spans:
            if span.start < end and start < span.end:
                hasher.update(span.mm_hash.encode() + (start - span.start).to_bytes(8, "little", signed=True))
        parent = hasher.digest()
        hashes.append(parent)
    return hashes
