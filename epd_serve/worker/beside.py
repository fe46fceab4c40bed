"""How much longer the stages of a model take beside each other: in two processes, and as threads of one.

Nothing else is running meanwhile: what gateway, clients and HTTP take from them is a matter of cores, and is
measured apart.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import fmean, median

import msgspec
import torch
from PIL import Image

from device.base import Device
from device.registry import get_device
from epd_serve.media import MediaLimits, open_image
from epd_serve.models.family import load_family
from epd_serve.models.tower import Tower
from epd_serve.worker.grid import GridOptions, step_timer
from epd_serve.worker.profile import IMAGE_SIDE, StepShape

#: Of each measurement, alone and beside; the median of some is taken.
SECONDS, ROUNDS = 0.4, 3
#: New tokens of the prompt, decodes and their contexts, the image as it is sent.
PROMPT, DECODES, CONTEXT, SENT_SIDE = 256, 4, 256, 1024
#: Those that can run at once: one step loop computes P and D of an instance.
APART = ("E", "P", "D")
WITHIN = (("D", "E"), ("P", "E"), ("E", "P"), ("E", "D"), ("D", "host"), ("P", "host"), ("E", "host"))
_READY_TIMEOUT_S = 300.0

Work = Callable[[], object]


@dataclass(kw_only=True, slots=True)
class Beside:
    """See :class:`~epd_serve.cost.profile.Profile`."""

    interference: dict[str, float] = field(default_factory=dict)
    interference_within: dict[str, float] = field(default_factory=dict)
    waiting_within: dict[str, float] = field(default_factory=dict)


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """``GridOptions`` on their way to another process."""

    model: str
    device: str
    dtype: str
    threads: int | None
    num_tokens: int


def stages_beside(options: GridOptions, progress: Callable[[str], None] = lambda text: None) -> Beside:
    """Measure all pairs; takes the device for itself.

    What a stage waits for is told from what it computes by the CPU time of its thread, so ``waiting_within`` is of
    stages with one thread, and else empty.
    """
    found = Beside()
    with _stages(options) as works:
        for name, other in WITHIN:
            progress(f"{name} beside {other} in one process")
            busy = _Thread(works[other], options)
            more, waits = _longer(works[name], busy.pause, busy.go_on)
            busy.close()
            found.interference_within[f"{name}/{other}"] = more
            if options.threads == 1:
                found.waiting_within[f"{name}/{other}"] = waits
        for other in APART:
            with _process(options, other) as (pause, go_on):
                for name in APART:
                    progress(f"{name} beside {other} in another process")
                    found.interference[f"{name}/{other}"] = _longer(works[name], pause, go_on)[0]
    return found


def _longer(work: Work, pause: Callable[[], None], go_on: Callable[[], None]) -> tuple[float, float]:
    """How much longer it takes beside the other one, and how much of that it waits; in parts of its time alone."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        pause()
        alone_s, alone_cpu_s = _mean_s(work)
        go_on()
        beside_s, cpu_s = _mean_s(work)
        more = beside_s / alone_s - 1
        found.append((more, min(more - (cpu_s - alone_cpu_s) / alone_s, more)))
    pause()
    more, waits = (median(values) for values in zip(*found, strict=True))
    return max(more, 0.0), max(waits, 0.0)


def _mean_s(work: Work) -> tuple[float, float]:
    """Seconds of a call, and of the CPU on this thread."""
    work()
    times: list[tuple[float, float]] = []
    until_s = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < until_s:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        work()
        times.append((time.perf_counter() - began_s, time.thread_time() - cpu_s))
    return fmean(one for one, _ in times), fmean(cpu_s for _, cpu_s in times)


@contextmanager
def _stages(options: GridOptions) -> Iterator[dict[str, Work]]:
    """Each stage of a size that is usual where they meet."""
    device = get_device(options.device)
    _activate(device, options)
    family = load_family(options.model)
    tower = Tower(options.model, options.dtype, device)
    inputs = family.preprocess(Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "gray"))
    sent = BytesIO()
    Image.new("RGB", (SENT_SIDE, SENT_SIDE), "gray").save(sent, "JPEG")
    with step_timer(options, device, family, time.perf_counter) as (timer, language):
        longest = min(language.max_model_len, options.num_tokens // (2 * DECODES))
        yield {
            "E": lambda: tower.encode([inputs]),
            "P": timer.step(StepShape(chunks=((0, min(PROMPT, longest)),))),
            "D": timer.step(StepShape(num_decodes=DECODES, context=min(CONTEXT, longest))),
            "host": lambda: family.preprocess(open_image(sent.getvalue(), MediaLimits())),
        }


def _activate(device: Device, options: GridOptions) -> None:
    device.activate()
    if options.threads is not None:
        device.set_threads(options.threads)


class _Thread:
    """Does a work again and again."""

    def __init__(self, work: Work, options: GridOptions) -> None:
        self._work, self._options = work, options
        self._goes_on, self._rests, self._ends = threading.Event(), threading.Event(), False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._end = self._threads.submit(self._run)

    def pause(self) -> None:
        """Returns when nothing is under way."""
        self._goes_on.clear()
        self._rests.wait()

    def go_on(self) -> None:
        self._rests.clear()
        self._goes_on.set()

    def close(self) -> None:
        """Raises what the work raised."""
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


@contextmanager
def _process(options: GridOptions, name: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """How to have another process rest, and how to have it work again."""
    asked = _Asked(
        model=str(options.model),
        device=options.device,
        dtype=str(options.dtype).removeprefix("torch."),
        threads=options.threads,
        num_tokens=options.num_tokens,
    )
    command = [sys.executable, "-P", "-m", "epd_serve.worker.beside", msgspec.json.encode(asked).decode(), name]
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def tell(word: bytes, timeout_s: float = _READY_TIMEOUT_S) -> None:
        stdin.write(word)
        if not select.select([stdout], [], [], timeout_s)[0] or not stdout.read(1):
            raise RuntimeError(f"the process that computes {name} beside others does not answer")

    try:
        tell(b"p")
        yield lambda: tell(b"p"), lambda: tell(b"g")
    finally:
        stdin.close()
        process.wait()
        stdout.close()


def _answer(options: GridOptions, name: str) -> None:
    """The life of that process: "g" and it works, "p" and it rests; each is confirmed by a byte."""
    with _stages(options) as works:
        work, goes_on = works[name], False
        while True:
            if goes_on:
                work()
            if goes_on and not select.select([sys.stdin], [], [], 0)[0]:
                continue
            word = os.read(sys.stdin.fileno(), 1)
            if not word:
                return
            goes_on = word == b"g"
            os.write(sys.stdout.fileno(), word)


if __name__ == "__main__":
    _asked = msgspec.json.decode(sys.argv[1], type=_Asked)
    _answer(
        GridOptions(
            model=Path(_asked.model),
            model_name="",
            device=_asked.device,
            dtype=getattr(torch, _asked.dtype),
            threads=_asked.threads,
            num_tokens=_asked.num_tokens,
        ),
        sys.argv[2],
    )
