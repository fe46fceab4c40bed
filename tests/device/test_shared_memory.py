"""Memory of a device that several processes of a host use: mapped once, and not let go before its time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chip.accelerator import ChipDevice
from chips import ENVIRONMENT

from device import cuda_ipc
from device.registry import get_device

DEVICE = "chip:0"
OWNER = """
import sys, chip.chip
from device.registry import get_device
device = get_device(sys.argv[1])
memory, handle = device.share_memory(8)
memory.fill_(7)
device.synchronize()
print(handle.hex(), flush=True)
sys.stdin.readline()
print(memory.tolist(), flush=True)
"""


@pytest.fixture
def device() -> ChipDevice:
    device = get_device(DEVICE)
    assert isinstance(device, ChipDevice)
    device.synchronize()
    return device


@pytest.mark.parametrize(
    "name", [DEVICE, pytest.param("cuda:0", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]
)
def test_two_processes_use_the_same_memory(name: str) -> None:
    command = [sys.executable, "-c", OWNER, name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        device = get_device(name)
        device.activate()
        handle = bytes.fromhex(owner.stdout.readline())
        with device.map_memory(handle) as memory:
            assert memory.device == device.torch_device and memory.tolist() == [7] * 8
            memory[2:4].fill_(1)
            device.synchronize()
            del memory
        print(file=owner.stdin, flush=True)
        assert owner.stdout.readline() == "[7, 7, 1, 1, 7, 7, 7, 7]\n"
    with pytest.raises(ValueError, match=r"cannot be mapped|cuIpc"), device.map_memory(handle):
        pass


def test_a_handle_goes_with_its_memory(device: ChipDevice) -> None:
    _, free = device.memory()
    memory, handle = device.share_memory(1 << 20)
    assert memory.tolist()[:2] == [0, 0]
    assert device.memory()[1] == free - (1 << 20)
    with device.map_memory(handle):
        assert device.memory()[1] == free - (1 << 20), "its owner alone has it"
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    del memory
    device.synchronize()
    assert device.memory()[1] == free and len(list(Path("/proc/self/fd").iterdir())) < num_files
    with pytest.raises(ValueError, match="cannot be mapped"), device.map_memory(handle):
        pass


def test_memory_that_launched_work_uses_is_not_unmapped(device: ChipDevice) -> None:
    own, handle = device.share_memory(8)
    gate = threading.Event()
    with pytest.raises(RuntimeError, match=r"memory is unmapped that .* work or a tensor still uses"):  # noqa: SIM117
        with device.map_memory(handle) as memory:
            device.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
            memory.fill_(1)
            del memory
    gate.set()
    device.synchronize()
    assert own.tolist() == [1] * 8


def test_the_device_reads_memory_that_is_pinned_in_place_when_it_comes_to_it(device: ChipDevice) -> None:
    memory, gate = torch.zeros(8), threading.Event()
    copies = []
    for unpin in (device.pin_in_place(memory), None):
        device.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
        copies.append(memory[4:].to(device.torch_device, non_blocking=True))
        memory.fill_(7)
        gate.set()
        device.synchronize()
        memory.fill_(0)
        gate.clear()
        if unpin is not None:
            unpin()
    assert [copy.tolist() for copy in copies] == [[7] * 4, [0] * 4]


def test_a_cpu_s_memory_is_no_device_s() -> None:
    memory, handle = get_device("cpu").share_memory(4)
    assert memory.tolist() == [0] * 4 and handle == b""
    with pytest.raises(ValueError, match="memory of cpu devices is not shared"):
        get_device("cpu").map_memory(b"")


_CONTEXT, _INVALID_CONTEXT = 4711, 201


class Driver:
    """The driver's calls over memory of this process, which takes itself for another one."""

    def __init__(self, memory: torch.Tensor, offset: int) -> None:
        self.base, self.nbytes = memory.data_ptr() - offset, memory.nbytes + offset
        self.opened: list[int] = []
        self.current: dict[int, list[int]] = {threading.get_ident(): [_CONTEXT]}  # contexts by thread
        self.error = 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self._contexts()[-1]
        return self.error

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        assert context.value is not None
        self._contexts().append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self._contexts().pop()
        return 0

    def _contexts(self) -> list[int]:
        return self.current.setdefault(threading.get_ident(), [])

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        assert self.base <= address.value < self.base + self.nbytes
        base._obj.value, size._obj.value = self.base, self.nbytes
        return self.error

    def cuIpcGetMemHandle(self, handle: Any, base: ctypes.c_uint64) -> int:
        handle._obj.reserved = str(base.value).encode()
        return self.error

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        assert flags.value == 1, "also from a GPU beside it"
        address._obj.value = int(handle.reserved)
        self.opened.append(address._obj.value)
        return self.error

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        if self._contexts()[-1:] != [_CONTEXT]:
            return _INVALID_CONTEXT
        self.opened.remove(address.value)
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: ctypes.c_uint, scope: ctypes.c_uint) -> int:
        assert (target.value, scope.value) == (0, 100), "of the current context, for its owner"
        return self.error

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


def test_the_driver_is_called_as_its_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor may lie anywhere in an allocation of the driver, which handles name as a whole."""
    whole = torch.arange(64, dtype=torch.uint8)
    memory = whole[16:48]
    driver = Driver(memory, offset=16)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    handle = cuda_ipc.export_memory(memory)
    with cuda_ipc.mapped_memory(handle, torch.device("cpu")) as mapped:
        assert driver.opened == [whole.data_ptr()]
        assert mapped.tolist() == list(range(16, 48))
        mapped.fill_(1)
    assert driver.opened == []
    assert whole.tolist() == [*range(16), *[1] * 32, *range(48, 64)]
    cuda_ipc.settle_arrivals()
    with pytest.raises(ValueError, match="7 bytes are no handle of GPU memory"):  # noqa: SIM117
        with cuda_ipc.mapped_memory(b"handle.", torch.device("cpu")):
            pass
    driver.error = 1
    with pytest.raises(ValueError, match="cuMemGetAddressRange_v2: invalid argument"):
        cuda_ipc.export_memory(memory)
    with pytest.raises(ValueError, match="cuFlushGPUDirectRDMAWrites: invalid argument"):
        cuda_ipc.settle_arrivals()


def test_a_mapping_may_close_on_a_thread_without_a_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    driver = Driver(memory, offset=0)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    mapping = cuda_ipc.mapped_memory(cuda_ipc.export_memory(memory), torch.device("cpu"))
    mapping.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(mapping.__exit__, None, None, None).result()
    assert driver.opened == []
    assert sorted(driver.current.values()) == [[], [_CONTEXT]], "each thread has the contexts that it had"
