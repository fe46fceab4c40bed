"""Sizes of an instance that follow from its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd_serve.config import InstanceOptions
from epd_serve.config.sizes import StepSizes
from epd_serve.types import Role

GB = 10**9


@pytest.mark.parametrize(
    ("device", "memory_gb", "num_seqs"),
    [
        ("cuda", 85, 256),  # H100, as it says of itself: 79.6 GiB
        ("cuda", 192, 512),
        ("cuda", 24, 64),
        ("cuda", 1, 16),
        ("emulated", 141, 256),
        ("cpu", 512, 64),
        ("npu", 64, 64),
    ],
)
def test_sizes_grow_with_the_memory_of_gpus(device: str, memory_gb: int, num_seqs: int) -> None:
    sizes = StepSizes.of_device(device, memory_gb * GB)
    assert sizes.max_num_seqs == num_seqs
    assert sizes.max_num_batched_tokens == 2048
    if device not in ("cpu", "npu"):
        assert 2 * sizes.feature_cache_bytes <= 0.06 * memory_gb * GB or memory_gb == 1


@pytest.mark.parametrize(("share", "num_seqs"), [({}, 256), ({"memory_share": 0.3}, 64), ({"max_num_seqs": 5}, 5)])
def test_what_is_asked_for_stays(share: dict[str, Any], num_seqs: int) -> None:
    """And a share of a device has a share of its memory."""
    options = InstanceOptions(
        name="d0", role=Role.parse("D"), model=Path("m"), served_model_name="m", device="cuda:0", **share
    )
    assert options.on_memory(85 * GB).sizes.max_num_seqs == num_seqs
    assert options.max_num_seqs == share.get("max_num_seqs"), "the options stay as they were written"
