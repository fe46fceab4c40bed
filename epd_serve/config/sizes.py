"""Amounts of memory as people write them: ``512MiB``, ``2Gi``, ``1.5GB`` or a number of bytes; bandwidths too."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

_PREFIXES = "KMGT"
_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate(_PREFIXES, start=1):
    _UNITS |= dict.fromkeys((f"{_prefix}I", f"{_prefix}IB"), 1024**_power)
    _UNITS |= dict.fromkeys((_prefix, f"{_prefix}B"), 1000**_power)

_PATTERN = r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$"


def parse_bytes(value: object) -> object:
    """``"512MiB"`` → 536870912, in the units of Kubernetes (Mi) and of everyone (MiB, MB).

    Anything but text passes unchanged, for the next check to judge. Raises ValueError for text of another form.
    """
    if not isinstance(value, str):
        return value
    match = re.match(_PATTERN, value)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is no amount of memory; write bytes, or a unit as in '512MiB' or '2GiB'")
    return int(Decimal(match[1]) * factor)


def in_binary_units(num_bytes: int) -> str:
    """``536870912`` → ``"512MiB"``: the largest unit in which it is whole, else one decimal, rounded up."""
    for power in range(len(_PREFIXES), 0, -1):
        unit, name = 1024**power, f"{_PREFIXES[power - 1]}iB"
        if num_bytes >= unit:
            return f"{math.ceil(num_bytes * 10 / unit) / 10:g}{name}"
    return f"{num_bytes} B"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(gt=0),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": _PATTERN}]}
    ),
]


def parse_rate(value: object) -> object:
    """``"2GB/s"`` → 2000000000 bytes per second; otherwise as :func:`parse_bytes`."""
    return parse_bytes(value.strip().removesuffix("/s") if isinstance(value, str) else value)


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
        """A power of two of sequences, 256 for 80 GB; 32 tokens and 8 MiB of features each way for each of them.

        The bandwidth of a GPU grows with its memory, and with it the batch that it decodes at no loss of time. A
        CPU, whose memory says nothing of that, and an NPU, which has few tasks of graphs, keep to 64 sequences.
        """
        if device in ("cpu", "npu") or not memory_bytes:
            return cls()
        most = min(max(memory_bytes * 256 // 80_000_000_000, 16), 512)
        num_seqs = 1 << (most.bit_length() - 1)
        return cls(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(32 * num_seqs, 2048),
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
