"""Byte amounts, and the default sizes of an instance for its device's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field, WithJsonSchema

_PREFIXES = "KMGT"


def in_binary_units(num_bytes: int) -> str:
    """Format ``536870912`` as ``"512MiB"``, in the largest unit, with at most one decimal, rounded up."""
    for power in range(len(_PREFIXES), 0, -1):
        unit, name = 1024**power, f"{_PREFIXES[power - 1]}iB"
        if num_bytes >= unit:
            return f"{math.ceil(num_bytes * 10 / unit) / 10:g}{name}"
    return f"{num_bytes} B"


#: A number of bytes, or text such as ``512MiB`` and ``1.5GB``.
Bytes = Annotated[
    ByteSize,
    Field(gt=0),
    AfterValidator(int),  # a plain int for messages between processes
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d*\.?\d+\s*[KMGTkmgt]?i?[Bb]?\s*$"},
            ]
        }
    ),
]


#: Minimum blocks of a KV cache with a size derived from the memory, and with a configured size.
MIN_BLOCKS, _LEAST_BLOCKS = 64, 8
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Default sizes of an instance, derived from its device's memory.

    Attributes:
        max_num_seqs, max_num_batched_tokens: limits of a step.
        feature_cache_bytes: cache of encoder output, on E and on P.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    feature_cache_bytes: int = 256 * _MIB

    @classmethod
    def of_device(cls, device: str, memory_bytes: int) -> StepSizes:
        """Return a power of two of sequences, 256 for 80 GB, and 8 MiB of feature cache for each.

        A GPU's bandwidth, and the batch that it decodes at full speed, grow with its memory. A CPU, whose
        memory is unrelated to its speed, and an NPU, with few graph tasks, get 64 sequences.
        """
        if device in ("cpu", "npu") or not memory_bytes:
            return cls()
        most = min(max(memory_bytes * 256 // 80_000_000_000, 16), 512)
        num_seqs = 1 << (most.bit_length() - 1)
        return cls(max_num_seqs=num_seqs, feature_cache_bytes=8 * _MIB * num_seqs)


def blocks_in(kv_cache_bytes: int, *, block_bytes: int, block_size: int, state_blocks: int = 0) -> int:
    """Return the KV blocks in these bytes. Raises ValueError for too few."""
    blocks, least = kv_cache_bytes // block_bytes, _LEAST_BLOCKS + state_blocks
    if blocks < least:
        state = f", {state_blocks} of them for the recurrent state of a sequence" if state_blocks else ""
        raise ValueError(
            f"kv_cache_bytes: {in_binary_units(kv_cache_bytes)} hold {blocks} blocks of {block_size} tokens of "
            f"this model; write {in_binary_units(least * block_bytes)} or more, which are {least} blocks{state}"
        )
    return blocks
