"""The two sides of a pair: processes that share a device, as instances in parentheses do, or streams of one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import torch

from device import mps
from device.base import Device
from device.registry import get_device
from epd_serve.profiling.workloads import WORKLOADS, Call, Factory, Sizes

_WARM_UP_CALLS = 2
_TIMEOUT_S = 60.0
_MODULE = "epd_serve.profiling.sides"  # also where this file runs as __main__


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The device and number format of both sides. Of each: ``threads`` of a CPU, the ``share`` of the device."""

    device: str
    dtype: str
    threads: int | None
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
        self._name = ""
        self._call: Call | None = None

    def prepare(self, name: str) -> None:
        if name == self._name:
            return
        self._call, self._name = None, name  # the old one's memory goes first
        with torch.inference_mode(), self._stream:
            self._call = WORKLOADS[name].build(self._factory)
            for _ in range(_WARM_UP_CALLS):
                self._call()
            self._stream.synchronize()

    def run(self, command: Run) -> list[float]:
        assert self._call is not None
        times: list[float] = []
        time.sleep(max(0.0, command.start_s - time.monotonic()))
        with torch.inference_mode(), self._stream:
            while not times or time.monotonic() < command.end_s:
                begun = time.monotonic()
                self._call()
                self._stream.synchronize()
                times.append(time.monotonic() - begun)
        # the last call may have outlasted the other side
        return times[:-1] or times


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
        self._thread.shutdown()


class ProcessSide:
    """A process, as each of several instances on one device is."""

    def __init__(self, setting: Setting) -> None:
        self._process = _start(setting)
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


def _start(setting: Setting) -> subprocess.Popen[bytes]:
    """Start a process that runs :func:`answer`."""
    environment = dict(os.environ)
    if setting.threads is not None:
        environment["OMP_NUM_THREADS"] = str(setting.threads)
    if setting.share is not None and setting.device.startswith("cuda"):
        environment |= mps.share_variables(setting.share)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(setting).decode()],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


if __name__ == "__main__":
    answer(msgspec.json.decode(sys.argv[1], type=Setting))
