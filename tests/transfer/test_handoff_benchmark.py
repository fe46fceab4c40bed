"""The benchmark of hand-overs runs on an emulated device, where what the host copies is counted."""

from __future__ import annotations

import pytest
from transports import HAS_MOONCAKE

from benchmarks import handoff
from epd_serve.protocol.wire import KVLayout


@pytest.mark.slow
def test_from_device_to_device_the_host_copies_indices_alone() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32", model="m")
    rows = dict(handoff.measure_kv("emulated:h200", layout, num_tokens=400, repeats=1))
    nbytes = rows["auto"]["nbytes"]
    assert nbytes == 3 * 2 * 400 * 2 * 16 * 4
    num_indices = 2 * 8 * 400 // 16
    assert rows["auto"]["host_bytes"] == num_indices
    # P: to the host; D: from P's memory into its own, and to the device; one layer at a time
    assert rows["shm"]["host_bytes"] == rows["tcp"]["host_bytes"] == 3 * nbytes + 3 * num_indices
    if HAS_MOONCAKE:
        assert rows["mooncake"]["host_bytes"] == 0
    else:
        assert "not installed" in rows["mooncake"]["lacks"]


@pytest.mark.slow
def test_the_host_copies_nothing_of_a_feature_from_device_to_device() -> None:
    rows = dict(handoff.measure_feature("emulated:h200", (100, 64), repeats=2))
    assert rows["auto"]["host_bytes"] == 0
    # E: to the host, and into its store; P: from there, and to the device
    assert rows["shm"]["host_bytes"] == 4 * rows["shm"]["nbytes"] == 4 * 100 * 64 * 2
    assert rows["tcp"]["host_bytes"] == rows["shm"]["host_bytes"]
    if HAS_MOONCAKE:
        assert rows["mooncake"]["host_bytes"] == 8, "its generation"
