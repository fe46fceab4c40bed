"""The two sides of a pair: processes that share a device, as instances in parentheses do, or streams of one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from device.base import Device
from device.distributed import ProcessGroup
from device.registry import get_device
from epd_serve.cost.interference import Clock
from epd_serve.profiling.workloads import COLLECTIVE, WORKLOADS, Call, Factory, Sizes

_WARM_UP_CALLS = 2
_TIMEOUT_S = 60.0
_MODULE = "epd_serve.profiling.sides"  # also where this file runs as __main__


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The device and number format of both sides; ``threads``: of each, on a CPU.

    See :class:`InterferenceMatrix`. ``share``: of the device, for the process of each side.
    """

    device: str
    dtype: str
    threads: int | None
    clock: Clock
    share: float | None = None


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Build workload ``name`` and warm it up."""

    name: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """Call the prepared workload again and again between two points of the system's monotonic clock."""

    start_s: float
    end_s: float


class Side(Protocol):
    """Runs one workload at a time. Both methods return at once; failures come out of the future."""

    def prepare(self, name: str) -> Future[None]: ...

    def run(self, command: Run) -> Future[list[float]]:
        """Seconds of each call that lay within the time, or of one where this side was held up until its end."""
        ...

    def close(self) -> None: ...


class Runner:
    """One side's own work, on the thread that calls it."""

    def __init__(self, setting: Setting) -> None:
        self._device: Device = get_device(setting.device)
        self._device.activate()
        if setting.share is not None:
            self._device.apply_share(setting.share)
        if setting.threads is not None:
            self._device.set_threads(setting.threads)
        dtype: torch.dtype = getattr(torch, setting.dtype)
        self._factory = Factory(self._device, dtype, Sizes.for_device(self._device.type))
        self._stream = self._device.stream()
        self._setting = setting
        self._name = ""
        self._call: Call | None = None
        self._peer: CollectivePeer | None = None

    def prepare(self, name: str) -> None:
        if name == self._name:
            return
        self._call, self._name = None, name  # the old one's memory goes first
        build = WORKLOADS[name].build
        with torch.inference_mode(), self._stream:
            if build is not None:
                self._call = build(self._factory)
            else:
                self._peer = self._peer or CollectivePeer(self._setting)
                self._call = self._peer.reduce
            for _ in range(_WARM_UP_CALLS):
                self._call()
            self._stream.synchronize()

    def run(self, command: Run) -> list[float]:
        assert self._call is not None
        times: list[float] = []
        clock = time.monotonic
        if self._setting.clock == "cpu":
            # a collective's work is done by threads of its group
            clock = time.process_time if self._name == COLLECTIVE else time.thread_time
        time.sleep(max(0.0, command.start_s - time.monotonic()))
        with torch.inference_mode(), self._stream:
            while not times or time.monotonic() < command.end_s:
                begun = clock()
                self._call()
                self._stream.synchronize()
                times.append(clock() - begun)
        # the last call may have outlasted the other side
        return times[:-1] or times

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


class CollectivePeer:
    """The other rank of a collective: a process that takes part until this one says so."""

    def __init__(self, setting: Setting) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="epd-serve-")
        rendezvous = Path(self._directory.name) / "rendezvous"
        self._process = start_python("take_part", setting, str(rendezvous), pipes=False)
        device = get_device(setting.device)
        self._data = collective_data(device, setting)
        self._group = ProcessGroup(device, 0, 2, rendezvous, _TIMEOUT_S)

    def reduce(self) -> None:
        self._group.all_reduce(self._data)

    def close(self) -> None:
        with torch.inference_mode():
            self._data[0] = 1
            self.reduce()
        self._group.close()
        self._process.wait(_TIMEOUT_S)
        self._directory.cleanup()


def collective_data(device: Device, setting: Setting) -> torch.Tensor:
    """A tensor of zeros; a sum that begins with another number is the last one."""
    dtype: torch.dtype = getattr(torch, setting.dtype)
    length = Sizes.for_device(device.type).stream_bytes // 16 // dtype.itemsize
    return torch.zeros(length, dtype=dtype, device=device.torch_device)


def take_part(setting: Setting, rendezvous: str) -> None:
    """The main function of a :class:`CollectivePeer`'s process."""
    device = get_device(setting.device)
    if setting.threads is not None:
        device.set_threads(setting.threads)
    group = ProcessGroup(device, 1, 2, Path(rendezvous), _TIMEOUT_S)
    data = collective_data(device, setting)
    while not data[0]:
        group.all_reduce(data)
    group.close()


class StreamSide:
    """A thread of this process with a stream of its own, as the tower is in an instance with several stages."""

    def __init__(self, setting: Setting) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="side")
        self._runner = self._thread.submit(Runner, setting).result()

    def prepare(self, name: str) -> Future[None]:
        return self._thread.submit(self._runner.prepare, name)

    def run(self, command: Run) -> Future[list[float]]:
        return self._thread.submit(self._runner.run, command)

    def close(self) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


class ProcessSide:
    """A process, as each of several instances on one device is."""

    def __init__(self, setting: Setting) -> None:
        self._process = start_python("answer", setting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="side")

    def prepare(self, name: str) -> Future[None]:
        return self._thread.submit(self._ask, Prepare(name), None)

    def run(self, command: Run) -> Future[list[float]]:
        return self._thread.submit(self._ask, command, list[float])

    def close(self) -> None:
        self._thread.shutdown()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.close()
        try:
            self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def _ask(self, command: Prepare | Run, answer: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(msgspec.json.encode(command) + b"\n")
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(
                f"a process of the measurement ended with exit code {self._process.wait(_TIMEOUT_S)}"
            )
        return msgspec.json.decode(line, type=answer)


def answer(setting: Setting) -> None:
    """The main function of a :class:`ProcessSide`'s process: a command a line in, an answer a line out."""
    runner = Runner(setting)
    decoder = msgspec.json.Decoder(Prepare | Run)
    for line in sys.stdin.buffer:
        command = decoder.decode(line)
        reply: list[float] | None = None
        if isinstance(command, Run):
            reply = runner.run(command)
        else:
            runner.prepare(command.name)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    runner.close()


def start_python(life: str, setting: Setting, *arguments: str, pipes: bool = True) -> subprocess.Popen[bytes]:
    """Start a process that runs the function called ``life`` in this file."""
    environment = dict(os.environ)
    if setting.threads is not None:
        environment["OMP_NUM_THREADS"] = str(setting.threads)
    pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, life, msgspec.json.encode(setting).decode(), *arguments],
        bufsize=0,
        stdin=pipe,
        stdout=pipe,
        env=environment,
    )


if __name__ == "__main__":
    _life, _setting, *_arguments = sys.argv[1:]
    lives: dict[str, Callable[..., None]] = {"answer": answer, "take_part": take_part}
    lives[_life](msgspec.json.decode(_setting, type=Setting), *_arguments)
