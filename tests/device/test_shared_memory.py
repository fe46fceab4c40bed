"""Memory of a device that several processes of a host use: mapped once, and not let go before its time."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chip.accelerator import ChipDevice
from chips import ENVIRONMENT

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
    "name",
    [DEVICE, pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
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
        mapping = device.map_memory(handle)
        with ThreadPoolExecutor(1) as opener, ThreadPoolExecutor(1) as closer:  # threads without a current device
            memory = opener.submit(mapping.__enter__).result()
            assert memory.device == device.torch_device and memory.tolist() == [7] * 8
            memory[2:4].fill_(1)
            device.synchronize()
            del memory
            closer.submit(mapping.__exit__, None, None, None).result()
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
