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
            found[f"{name}/{other}"] = _longer(works[name], works[other], options)
    return found


def _longer(work: Work, other: Work, options: GridOptions) -> float:
    found: list[float] = []
    for _ in range(ROUNDS):
        alone_s = _mean_s(work)
        with _repeating(other, options):
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


@contextmanager
def _repeating(work: Work, options: GridOptions) -> Iterator[None]:
    """Repeat a work on another thread inside the block. Raises the work's own exception."""
    begun, over = threading.Event(), threading.Event()

    def repeat() -> None:
        try:
            _activate(get_device(options.device), options)
            while not over.is_set():
                work()
                begun.set()
        finally:
            begun.set()

    with ThreadPoolExecutor(1, thread_name_prefix="beside") as threads:
        end = threads.submit(repeat)
        begun.wait()
        try:
            yield
        finally:
            over.set()
    end.result()
