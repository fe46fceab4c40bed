"""Memory of a device that several processes of a host use: mapped once, and not let go before its time."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def test_a_cpu_s_memory_is_no_device_s() -> None:
    memory, handle = get_device("cpu").share_memory(4)
    assert memory.tolist() == [0] * 4 and handle == b""
    with pytest.raises(ValueError, match="memory of cpu devices is not shared"):
        get_device("cpu").map_memory(b"")


class Driver:
    """The driver's calls, of which those about memory need a context."""

    def __init__(self) -> None:
        self.contexts = threading.local()
        self.open: list[int] = []
        self.memory = torch.arange(8, dtype=torch.uint8)

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 4711
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.of_thread = [*getattr(self.contexts, "of_thread", []), context.value]
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts.of_thread.pop()
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        address._obj.value = self.memory.data_ptr()
        self.open.append(address._obj.value)
        return self._error()

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.open.remove(address.value)
        return self._error()

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"invalid device context"
        return 0

    def _error(self) -> int:
        return 0 if getattr(self.contexts, "of_thread", []) == [4711] else 201


def test_a_mapping_opens_and_closes_on_threads_without_a_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    cuda_ipc._primary_context.cache_clear()
    mapping = cuda_ipc.mapped_memory(bytes(64) + struct.pack("<qq", 2, 3), torch.device("cpu"))
    with ThreadPoolExecutor(1) as opener, ThreadPoolExecutor(1) as closer:
        assert opener.submit(mapping.__enter__).result().tolist() == [2, 3, 4]
        closer.submit(partial(mapping.__exit__, None, None, None)).result()
    assert not driver.open
    cuda_ipc._primary_context.cache_clear()
