"""An emulated accelerator: nothing is there before its time, nothing is mixed with the host, memory ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from device.base import DeviceUnavailable
from device.emulated.accelerator import EmulatedDevice
from device.emulated.chip import never_waiting
from device.emulated.timeline import WHOLE, Demand
from device.present import EMULATED_MEMORY
from device.registry import get_device

LAUNCH_S = 0.05


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = get_device("emulated:h200")
    assert isinstance(device, EmulatedDevice)
    device.synchronize()
    device.chip.launch_s = LAUNCH_S
    yield device
    device.chip.launch_s = 0.0
    device.synchronize()


def test_a_name_says_what_it_is() -> None:
    assert get_device("emulated:h200:0").name == "emulated:h200:0"
    assert get_device("emulated:ascend-910b3:5").description == "emulated ascend-910b3"
    with pytest.raises(DeviceUnavailable, match="device 'tpu' is not known; there are a100"):
        get_device("emulated:tpu:0")
    with pytest.raises(ValueError, match="emulated:5 is emulated:ascend-910b3:5 in this process"):
        get_device("emulated:a100:5")


def test_what_is_read_early_is_no_number(device: EmulatedDevice) -> None:
    numbers = torch.arange(3.0, device=device.torch_device) + 1
    early = numbers.to("cpu", non_blocking=True)
    tokens = numbers.long().to("cpu", non_blocking=True)
    assert early.isnan().all() and (tokens < 0).all()
    device.synchronize()
    assert early.tolist() == tokens.tolist() == [1, 2, 3]


def test_a_stream_that_waits_for_no_event_goes_on_without_the_numbers(device: EmulatedDevice) -> None:
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
    device: EmulatedDevice,
) -> None:
    pinned, ordinary = device.pin_memory(torch.zeros(2)), torch.zeros(2)
    from_pinned = pinned.to(device.torch_device, non_blocking=True)
    from_ordinary = ordinary.to(device.torch_device, non_blocking=True)
    pinned.fill_(7)
    ordinary.fill_(7)
    assert from_pinned.tolist() == [7, 7], "the copy was still under way"
    assert from_ordinary.tolist() == [0, 0]


def test_a_thread_that_never_waits_copies_through_pinned_memory_alone(device: EmulatedDevice) -> None:
    where = device.torch_device
    there, pinned = torch.ones(3, device=where), device.pin_memory(torch.ones(3))
    waits: dict[str, Callable[[], object]] = {
        "a blocking copy": lambda: pinned.to(where),
        "ordinary memory": lambda: torch.ones(3).to(where, non_blocking=True),
        "a new tensor": lambda: torch.tensor([1.0], device=where),
        "reading back": lambda: there.cpu(),
        "a number": lambda: there.sum().item(),
        "a shape": lambda: there.nonzero(),
        "an event": lambda: device.record_event().synchronize(),
    }
    for name, wait in waits.items():
        with never_waiting(), pytest.raises(RuntimeError, match="the host waits for the device"):
            wait()
            pytest.fail(name)
        wait()
    with never_waiting():
        twice = pinned.to(where, non_blocking=True) + there
        early = twice.to("cpu", non_blocking=True)
    device.synchronize()
    assert early.tolist() == [2, 2, 2]


def test_a_launch_returns_at_once(device: EmulatedDevice) -> None:
    done = threading.Event()
    device.current_stream()
    start, end = device.event(enable_timing=True), device.event(enable_timing=True)
    start.record()
    torch.ones(2, device=device.torch_device)
    end.record()
    assert not end.query() and not done.is_set()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 1e3 * LAUNCH_S


def test_a_graph_replays_what_was_captured_over_what_its_buffers_hold(device: EmulatedDevice) -> None:
    device.chip.launch_s = 0.0
    buffer, factor = torch.ones(2, device=device.torch_device), 2.0
    runner = device.graph_runner()
    runner.capture(2, lambda: buffer * factor)
    factor = 3.0  # a number of the host is as it was
    buffer.fill_(5)
    runner.update(2, [1, 1])
    assert runner.replay(2).tolist() == [10.0, 10.0]


def test_a_capture_that_reads_back_fails_and_the_device_goes_on(device: EmulatedDevice) -> None:
    device.chip.launch_s = 0.0
    numbers, runner = torch.ones(2, device=device.torch_device), device.graph_runner()

    def reads() -> torch.Tensor:
        return numbers * numbers.sum().item()

    assert reads().tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="a step that is captured reads nothing back and waits for nothing"):
        runner.capture(2, reads)
    assert reads().tolist() == [2, 2]
    runner.capture(2, lambda: numbers + 1)
    assert runner.replay(2).tolist() == [2, 2]


def test_timed_work_is_done_no_sooner_than_on_the_device(device: EmulatedDevice) -> None:
    device.chip.launch_s = 0.0
    numbers = torch.ones(2, device=device.torch_device)
    device.synchronize()
    began_s = time.perf_counter()
    begin, middle = device.event(enable_timing=True), device.event(enable_timing=True)
    begin.record()
    with device.timed(0.2, WHOLE, num_parts=2) as next_part:
        half = numbers + 1
        next_part()
        middle.record()
        whole = half + 1
    assert time.perf_counter() - began_s < 0.1, "a launch returns at once"
    assert whole.tolist() == [3, 3]
    assert 0.2 <= time.perf_counter() - began_s < 0.4
    assert 90 <= begin.elapsed_time(middle) < 190


def test_timed_work_takes_as_long_as_the_cpu_where_that_is_longer(device: EmulatedDevice) -> None:
    numbers = torch.ones(2, device=device.torch_device)
    device.synchronize()
    began_s = time.perf_counter()
    for _ in range(4):
        with device.timed(LAUNCH_S / 10, WHOLE):
            numbers = numbers + 1
    assert numbers.tolist() == [5, 5]
    assert time.perf_counter() - began_s >= 4 * LAUNCH_S


def test_a_large_copy_takes_the_time_of_the_host_link() -> None:
    device = get_device("emulated:h100:6")
    numbers = torch.zeros(64_000_000, dtype=torch.uint8)
    began_s = time.perf_counter()
    numbers.to(device.torch_device)
    assert time.perf_counter() - began_s >= 0.001


def test_a_share_of_the_arithmetic_slows_what_computes() -> None:
    device = get_device("emulated:h100:6")
    assert isinstance(device, EmulatedDevice)
    assert device.apply_share(0.5).mechanisms == ("memory fraction 0.5", "50% of the arithmetic")
    for demand, seconds in ((Demand(compute=1.0, bandwidth=0.1), 0.1), (Demand(compute=0.1, bandwidth=0.8), 0.05)):
        began_s = time.perf_counter()
        with device.timed(0.05, demand):
            torch.ones(2, device=device.torch_device)
        device.synchronize()
        assert seconds <= time.perf_counter() - began_s < seconds + 0.045


def test_tensors_of_the_host_are_refused(device: EmulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on emulated, found \\(2,\\) on cpu"):
        torch.ones(2, device=device.torch_device) + torch.ones(2)


def test_work_that_fails_is_heard_of_when_the_host_waits() -> None:
    device = get_device("emulated:a100:13")
    index = torch.tensor([9], device=device.torch_device)
    torch.ones(2, device=device.torch_device).index_select(0, index)
    with pytest.raises(RuntimeError, match="work on emulated:a100:13 failed: index out of range"):
        device.synchronize()


def test_memory_ends_and_comes_back() -> None:
    device = get_device("emulated:rtx-4090:14")
    total, free = device.memory()
    assert total == free == 24_000_000_000
    device.set_memory_fraction(0.001)
    kept = torch.empty(20_000_000, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 9\.54 MiB on emulated:rtx-4090:14"):
        torch.empty(10_000_000, dtype=torch.uint8, device=device.torch_device)
    half = kept[:10_000_000]
    del kept
    assert device.headroom() == 4_000_000, "a view keeps all of it"
    del half
    assert device.headroom() == 24_000_000
    device.set_memory_fraction(1.0)


def test_processes_share_the_memory_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process is free when it has ended, however it ended."""
    monkeypatch.setenv(EMULATED_MEMORY, str(tmp_path))
    code = (
        "import torch\n"
        "from device.registry import get_device\n"
        "device = get_device('emulated:h20:4')\n"
        "held = torch.empty(3_000_000, dtype=torch.uint8, device=device.torch_device)\n"
        "print(device.memory()[1], flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == 96_000_000_000 - 3_000_000
        device = get_device("emulated:h20:4")
        held = torch.empty(1_000_000, dtype=torch.uint8, device=device.torch_device)
        assert device.memory() == (96_000_000_000, 96_000_000_000 - 4_000_000)
        other.kill()
    assert device.memory()[1] == 96_000_000_000 - 1_000_000
    del held
