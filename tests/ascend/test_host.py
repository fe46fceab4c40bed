"""AscendDevice through torch_npu's own streams, events, allocators and guards, over memory of the host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ascend_ladder import require_torch_npu
from on_thread import elsewhere

if "EPD_ASCEND_STUBS" not in os.environ:
    pytest.skip("this is about the ladder's own runtime", allow_module_level=True)
require_torch_npu()

from device import base  # noqa: E402
from device.ascend import AscendDevice  # noqa: E402
from device.base import DeviceLost  # noqa: E402
from device.copies import Readback, pin, to_device  # noqa: E402
from device.registry import get_device  # noqa: E402

NO_CONTEXT, LOST = 107002, 507000
MEBIBYTE = 1 << 20
MEMORY = 1024 * MEBIBYTE
RUNTIME = ctypes.CDLL("libascendcl.so")


@pytest.fixture
def npu() -> AscendDevice:
    device = AscendDevice(0)
    device.activate()
    device.synchronize()
    torch.get_device_module("npu").empty_cache()
    return device


@contextmanager
def held(stream: base.Stream) -> Iterator[None]:
    """The stream takes work, and does none of it before the end."""
    handle = ctypes.c_void_p(stream.native_handle)  # type: ignore[attr-defined]
    RUNTIME.host_hold(handle, 1)
    try:
        yield
    finally:
        RUNTIME.host_hold(handle, 0)


def context_error() -> int:
    """Ask the runtime for the calling thread's context, as Mooncake does."""
    return int(RUNTIME.aclrtGetCurrentContext(ctypes.byref(ctypes.c_void_p())))


def on(device: AscendDevice, *numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(device.torch_device)


def test_the_device_is_the_runtimes(npu: AscendDevice) -> None:
    assert (npu.description, npu.cores, npu.name) == ("Ascend910B1", 20, "npu:0")
    assert elsewhere(lambda: get_device("npu:1").name) == "npu:1"


def test_a_stream_that_waits_for_an_event_sees_the_numbers(npu: AscendDevice) -> None:
    copying, reading = npu.stream(), npu.stream(priority=1)
    there, copy = on(npu, 0, 0), on(npu, 0, 0)
    pinned = pin(torch.tensor([3.0, 4.0]), npu.torch_device)
    npu.synchronize()
    with held(copying):
        with copying:
            there.copy_(pinned, non_blocking=True)
            done = copying.record_event()
        reading.wait_event(done)
        with reading:
            copy.copy_(there, non_blocking=True)
            last = npu.record_event()
        assert not done.query() and not last.query()
    last.synchronize()
    assert done.query() and copy.tolist() == [3, 4]


def test_what_is_read_back_is_there_after_the_wait(npu: AscendDevice) -> None:
    numbers = on(npu, 1, 2, 3)
    with held(npu.current_stream()):
        readback = Readback(numbers)
        assert readback._copy.is_pinned() and readback._event is not None and not readback._event.query()
    assert readback.wait().tolist() == [1, 2, 3]


def test_pinned_memory_that_is_still_read_goes_to_nobody_else(npu: AscendDevice) -> None:
    npu.synchronize()
    with held(npu.current_stream()):
        there = to_device(torch.full((64,), 5.0), npu.torch_device)
        others = [pin(torch.full((64,), 7.0), npu.torch_device) for _ in range(4)]
    npu.synchronize()
    assert there.cpu().unique().tolist() == [5] and all(other.is_pinned() for other in others)


def test_memory_figures(npu: AscendDevice) -> None:
    used = npu.reset_peak_memory()
    # torch_npu pads by 32 bytes, then to 512.
    block = torch.empty(100 * MEBIBYTE - 32, dtype=torch.uint8, device=npu.torch_device)
    total, free = npu.memory()
    assert total == MEMORY and free <= MEMORY - 100 * MEBIBYTE
    assert npu.headroom() == MEMORY - used - 100 * MEBIBYTE
    del block
    assert npu.peak_memory() == used + 100 * MEBIBYTE, "it is no longer used"
    assert npu.headroom() == MEMORY - used, "the allocator holds it for this process"
    assert npu.reset_peak_memory() == used == npu.peak_memory()


def test_memory_ends_and_comes_back(npu: AscendDevice) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * MEMORY, dtype=torch.uint8, device=npu.torch_device)
    npu.set_memory_fraction(0.25)
    try:
        assert npu.headroom() <= MEMORY // 4
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MEMORY // 2, dtype=torch.uint8, device=npu.torch_device)
    finally:
        npu.set_memory_fraction(1.0)
    torch.empty(MEMORY // 2, dtype=torch.uint8, device=npu.torch_device)


def test_a_share_reaches_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    device = AscendDevice(1)
    monkeypatch.setattr(device._vendor.set_device_limit, "called", False)  # torch_npu takes one in a process
    mechanisms = device.apply_share(0.33).mechanisms
    assert mechanisms == ("memory fraction 0.33", "7 cube cores", "14 vector cores")
    limits = (ctypes.c_uint32(), ctypes.c_uint32())
    for kind, limit in enumerate(limits):
        RUNTIME.aclrtGetDeviceResLimit(1, kind, ctypes.byref(limit))
    assert [limit.value for limit in limits] == [7, 14]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MEMORY // 2, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(ValueError, match="torch_npu sets it once"):
        device.apply_share(0.5)
    device.set_memory_fraction(1.0)


def test_a_thread_uses_the_device_after_activate(npu: AscendDevice) -> None:
    def use() -> tuple[int, int]:
        before = context_error()
        npu.activate()
        return before, context_error()

    assert elsewhere(use) == (NO_CONTEXT, 0)


def test_a_device_that_fails_is_lost(npu: AscendDevice) -> None:
    npu.check()
    RUNTIME.host_break(LOST)
    try:
        with pytest.raises(DeviceLost, match="npu:0 is lost"):
            npu.check()
    finally:
        RUNTIME.host_break(0)
