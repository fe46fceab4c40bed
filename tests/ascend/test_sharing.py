"""Sharing an NPU between processes: ports, visible devices, cores. Needs neither torch_npu nor an NPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device import ascend
from device.ascend_environment import hccl_environment, parse_visible_devices
from device.base import DeviceUnavailable


@pytest.mark.parametrize("value", ["", "0,", "0-3", "npu:0", "0, 1", "1,1", "-1", "٣", "0;1"])
def test_other_visible_devices_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="distinct device numbers with commas"):
        parse_visible_devices(value)


@given(st.lists(st.integers(0, 280), min_size=2, max_size=2, unique=True))
def test_processes_get_ports_of_their_own(processes: list[int]) -> None:
    ranges = []
    for process in processes:
        environment = hccl_environment(process)
        host = int(environment["HCCL_IF_BASE_PORT"])
        first, last = map(int, environment["HCCL_NPU_SOCKET_PORT_RANGE"].split("-"))
        assert 1024 <= host <= 65520 and 1024 <= first < last <= 65535
        ranges.append((set(range(host, host + 16)), set(range(first, last + 1))))
    assert not ranges[0][0] & ranges[1][0]
    assert not ranges[0][1] & ranges[1][1]


@given(st.sampled_from([(20, 40), (24, 48), (25, 50), (8, 7), (20, 20)]), st.floats(0.01, 1))
def test_a_share_keeps_the_ratio_of_the_cores(cores: tuple[int, int], share: float) -> None:
    cube, vector = ascend.AscendDevice._share_of({"cube_core_num": cores[0], "vector_core_num": cores[1]}, share)
    assert cube * cores[1] == vector * cores[0] and 1 <= cube <= cores[0] and vector >= 1
    if cores[0] > 8:  # else it cannot be divided
        assert abs(cube - share * cores[0]) <= 1


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend310B1", "Ascend910A", "Ascend910ProB", "Ascend910B"])
def test_chips_without_the_operators_are_refused(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = SimpleNamespace(device_count=lambda: 1, get_device_name=lambda index: chip)
    monkeypatch.setattr(ascend, "missing", lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: vendor)
    with pytest.raises(DeviceUnavailable, match=f"npu:0: {chip} lacks paged attention"):
        ascend.open_device(0)
