"""The accelerator of tests: nothing is there before its time, nothing is mixed with the host, memory ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chip.accelerator import ChipDevice

from device import copies
from device.registry import get_device

LAUNCH_S = 0.05


@pytest.fixture
def device() -> Iterator[ChipDevice]:
    device = get_device("chip:0")
    assert isinstance(device, ChipDevice)
    device.synchronize()
    device.chip.launch_s = LAUNCH_S
    yield device
    device.chip.launch_s = 0.0
    device.synchronize()


def test_what_is_read_early_is_no_number(device: ChipDevice) -> None:
    numbers = torch.arange(3.0, device=device.torch_device) + 1
    early = numbers.to("cpu", non_blocking=True)
    tokens = numbers.long().to("cpu", non_blocking=True)
    assert early.isnan().all() and (tokens < 0).all()
    device.synchronize()
    assert early.tolist() == tokens.tolist() == [1, 2, 3]


def test_a_stream_that_waits_for_no_event_goes_on_without_the_numbers(device: ChipDevice) -> None:
    def computed(*, waits: bool) -> list[float]:
        numbers = torch.ones(2, device=device.torch_device) + 1 + 1 + 1
        side = device.stream()
        if waits:
            side.wait_event(device.record_event())
        with side:
            doubled = numbers * 2
            return list(doubled.cpu().tolist())

    assert computed(waits=True) == [8.0, 8.0]
    assert computed(waits=False) != [8.0, 8.0]


def test_the_device_reads_pinned_memory_when_it_comes_to_it_and_ordinary_memory_at_once(
    device: ChipDevice,
) -> None:
    pinned, ordinary = copies.pin(torch.zeros(2), device.torch_device), torch.zeros(2)
    from_pinned = pinned.to(device.torch_device, non_blocking=True)
    from_ordinary = ordinary.to(device.torch_device, non_blocking=True)
    pinned.fill_(7)
    ordinary.fill_(7)
    assert from_pinned.tolist() == [7, 7], "the copy was still under way"
    assert from_ordinary.tolist() == [0, 0]
