"""The two sides of a pair: processes that share a device, as instances in parentheses do, or streams of one."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from device import mps
from device.base import Device
from device.registry import get_device
from epd_serve.cost.interference import Isolation
from epd_serve.profiling.workloads import WORKLOADS, Call, Factory, Sizes

_WARM_UP_CALLS = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and number format of both sides. Of each: ``threads`` of a CPU, the ``share`` of the device."""

    device: str
    dtype: str
    threads: int | None
    share: float | None = None


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
        """Build a workload and warm it up."""
        if name == self._name:
            return
        self._call, self._name = None, name  # the old one's memory goes first
        with torch.inference_mode(), self._stream:
            self._call = WORKLOADS[name].build(self._factory)
            for _ in range(_WARM_UP_CALLS):
                self._call()
            self._stream.synchronize()

    def run(self, start_s: float, end_s: float) -> list[float]:
        """Call the prepared workload again and again between two points of the system's monotonic clock.

        Return the seconds of each call that lay within the time, or of one where this side was held up until its
        end.
        """
        assert self._call is not None
        times: list[float] = []
        time.sleep(max(0.0, start_s - time.monotonic()))
        with torch.inference_mode(), self._stream:
            while not times or time.monotonic() < end_s:
                begun = time.monotonic()
                self._call()
                self._stream.synchronize()
                times.append(time.monotonic() - begun)
        # the last call may have outlasted the other side
        return times[:-1] or times


_here = threading.local()  # the Runner of a side's thread


def _begin(setting: Setting) -> None:
    _here.runner = Runner(setting)


def _prepare(name: str) -> None:
    _here.runner.prepare(name)


def _run(start_s: float, end_s: float) -> list[float]:
    times: list[float] = _here.runner.run(start_s, end_s)
    return times


class Side:
    """A process, as each of several instances on one device is; or a thread of this process with a stream of its
    own, as the tower is in an instance with several stages.

    It runs one workload at a time. Its methods return at once; failures come out of the future.
    """

    def __init__(self, setting: Setting, isolation: Isolation) -> None:
        self._worker: Executor
        if isolation == "process":
            self._worker = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        else:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="side")
        variables = _variables(setting) if isolation == "process" else {}  # a process reads them as it starts
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ |= variables
        try:
            self._worker.submit(_begin, setting).result()
        except BaseException:
            self.close()
            raise
        finally:
            for name in variables:
                del os.environ[name]
            os.environ |= before

    def prepare(self, name: str) -> Future[None]:
        return self._worker.submit(_prepare, name)

    def run(self, start_s: float, end_s: float) -> Future[list[float]]:
        return self._worker.submit(_run, start_s, end_s)

    def close(self) -> None:
        self._worker.shutdown()


def _variables(setting: Setting) -> dict[str, str]:
    variables: dict[str, str] = {}
    if setting.threads is not None:
        variables["OMP_NUM_THREADS"] = str(setting.threads)
    if setting.share is not None and setting.device.startswith("cuda"):
        variables |= mps.share_variables(setting.share)
    return variables
