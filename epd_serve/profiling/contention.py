"""Slowdown of a model's stages beside each other in one process; ``overheads.py`` measures that of processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import fmean, median

from device.base import Device
from device.registry import get_device
from epd_serve.engine.pace.measurements import IMAGE_SIDE
from epd_serve.models.family import blank
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.profiling.device_profile import GridOptions, step_timer
from epd_serve.sched.step_sizes import StepShape

#: Of each measurement, alone and beside; the median of some is taken.
SECONDS, ROUNDS = 0.4, 3
#: New tokens of the prompt, decodes and their contexts.
PROMPT, DECODES, CONTEXT = 256, 4, 256
#: Those that run at once: one step loop computes P and D.
PAIRS = (("D", "E"), ("P", "E"), ("E", "P"), ("E", "D"))

Work = Callable[[], object]


def stages_beside(options: GridOptions, progress: Callable[[str], None] = lambda text: None) -> dict[str, float]:
    """Measure each pair: "D/E" is the share by which E lengthens D. Takes the device for itself."""
    found: dict[str, float] = {}
    with _stages(options) as works:
        for name, other in PAIRS:
            progress(f"{name} beside {other} in one process")
            busy = _Busy(works[other], options)
            try:
                found[f"{name}/{other}"] = _longer(works[name], busy)
            finally:
                busy.close()
    return found


def _longer(work: Work, busy: _Busy) -> float:
    found: list[float] = []
    for _ in range(ROUNDS):
        busy.pause()
        alone_s = _mean_s(work)
        busy.go_on()
        found.append(_mean_s(work) / alone_s - 1)
    return max(median(found), 0.0)


def _mean_s(work: Work) -> float:
    work()
    times: list[float] = []
    until_s = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return fmean(times)


@contextmanager
def _stages(options: GridOptions) -> Iterator[dict[str, Work]]:
    """Yield each stage as a callable, at a usual size."""
    device = get_device(options.device)
    _activate(device, options)
    family = load_family(options.model)
    tower = Tower(options.model, options.dtype, device)
    inputs = family.preprocess(blank((IMAGE_SIDE, IMAGE_SIDE)))
    with step_timer(options, device, family, time.perf_counter) as (timer, language):
        longest = min(language.max_model_len, options.num_tokens // (2 * DECODES))
        yield {
            "E": lambda: tower.encode([inputs]),
            "P": timer.step(StepShape(chunks=((0, min(PROMPT, longest)),))),
            "D": timer.step(StepShape(num_decodes=DECODES, context=min(CONTEXT, longest))),
        }


def _activate(device: Device, options: GridOptions) -> None:
    device.activate()
    if options.threads is not None:
        device.set_threads(options.threads)


class _Busy:
    """A thread that repeats a work between ``go_on`` and ``pause``."""

    def __init__(self, work: Work, options: GridOptions) -> None:
        self._work, self._options = work, options
        self._goes_on, self._rests, self._ends = threading.Event(), threading.Event(), False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._end = self._threads.submit(self._run)

    def pause(self) -> None:
        """Return when the work has stopped."""
        self._goes_on.clear()
        self._rests.wait()

    def go_on(self) -> None:
        self._rests.clear()
        self._goes_on.set()

    def close(self) -> None:
        """End the thread. Raises the work's own exception."""
        self._ends = True
        self._goes_on.set()
        self._threads.shutdown()
        self._end.result()

    def _run(self) -> None:
        _activate(get_device(self._options.device), self._options)
        try:
            while not self._ends:
                if self._goes_on.is_set():
                    self._work()
                else:
                    self._rests.set()
                    self._goes_on.wait()
        finally:
            self._rests.set()
