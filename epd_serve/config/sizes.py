"""Amounts of memory, and the sizes of an instance that follow from its device's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field, WithJsonSchema

_PREFIXES = "KMGT"


def in_binary_units(num_bytes: int) -> str:
    """``536870912`` → ``"512MiB"``: the largest unit in which it is whole, else one decimal, rounded up."""
    for power in range(len(_PREFIXES), 0, -1):
        unit, name = 1024**power, f"{_PREFIXES[power - 1]}iB"
        if num_bytes >= unit:
            return f"{math.ceil(num_bytes * 10 / unit) / 10:g}{name}"
    return f"{num_bytes} B"


#: A number of bytes, or text as in ``512MiB`` and ``1.5GB``.
Bytes = Annotated[
    ByteSize,
    Field(gt=0),
    AfterValidator(int),  # plain, as messages between processes need it
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d*\.?\d+\s*[KMGTkmgt]?i?[Bb]?\s*$"},
            ]
        }
    ),
]


MIN_BLOCKS = 64
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """The sizes of an instance that follow from its device's memory where nothing else is asked for.

    Attributes:
        max_num_seqs, max_num_batched_tokens: of a step.
        feature_cache_bytes: of encoder output, that E keeps and that P keeps.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    feature_cache_bytes: int = 256 * _MIB

    @classmethod
    def of_device(cls, device: str, memory_bytes: int) -> StepSizes:
        """A power of two of sequences, 256 for 80 GB, and 8 MiB of features each way for each of them.

        The bandwidth of a GPU grows with its memory, and with it the batch that it decodes at no loss of time. A
        CPU, whose memory says nothing of that, and an NPU, which has few tasks of graphs, keep to 64 sequences.
        """
        if device in ("cpu", "npu") or not memory_bytes:
            return cls()
        most = min(max(memory_bytes * 256 // 80_000_000_000, 16), 512)
        num_seqs = 1 << (most.bit_length() - 1)
        return cls(
            max_num_seqs=num_seqs,
            feature_cache_bytes=8 * _MIB * num_seqs,
        )


def tokens_per_block(block_size: int | None, device: str) -> int:
    """``block_size``, or 128 on an NPU, whose paged prefill takes no less, and 16 elsewhere."""
    return block_size or (128 if device.startswith("npu") else 16)


def blocks_in(kv_cache_bytes: int, *, block_bytes: int, block_size: int, state_blocks: int = 0) -> int:
    """KV blocks in so many bytes. Raises ValueError for fewer than :data:`MIN_BLOCKS` beside those of a state."""
    blocks, least = kv_cache_bytes // block_bytes, MIN_BLOCKS + state_blocks
    if blocks < least:
        state = f", {state_blocks} of them for the recurrent state of a sequence" if state_blocks else ""
        raise ValueError(
            f"kv_cache_bytes: {in_binary_units(kv_cache_bytes)} hold {blocks} blocks of {block_size} tokens of "
            f"this model; write {in_binary_units(least * block_bytes)} or more, which are {least} blocks{state}"
        )
    return blocks
