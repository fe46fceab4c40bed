"""The smallest KV cache, which a deployment file is held against before anything starts."""

from __future__ import annotations

from epd_serve.config.sizes import in_binary_units

MIN_BLOCKS = 64


def tokens_per_block(block_size: int | None, device: str) -> int:
    """``block_size``, or 128 on an NPU, whose paged prefill takes no less, and 16 elsewhere."""
    return block_size or (128 if device.startswith("npu") else 16)


def blocks_in(kv_cache_bytes: int, *, block_bytes: int, block_size: int) -> int:
    """KV blocks in so many bytes. Raises ValueError for fewer than :data:`MIN_BLOCKS`."""
    blocks = kv_cache_bytes // block_bytes
    if blocks < MIN_BLOCKS:
        raise ValueError(
            f"kv_cache_bytes: {in_binary_units(kv_cache_bytes)} hold {blocks} blocks of {block_size} tokens of "
            f"this model; write {in_binary_units(MIN_BLOCKS * block_bytes)} or more, which are {MIN_BLOCKS} blocks"
        )
    return blocks
