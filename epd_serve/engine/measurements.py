"""Times of steps and encodes on this device: measured before the instance serves, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from epd_serve.engine.runner import LanguageRunner
from epd_serve.models.family import Family, blank
from epd_serve.models.tower import Tower
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.step_sizes import StepShape
from epd_serve.sequence import Sequence, SequenceState
from epd_serve.types import SamplingParams

logger = logging.getLogger(__name__)

#: Encodes are measured with square images of this side, in pixels.
IMAGE_SIDE = 448
_RUNS = 3


class StepTimer:
    """Measures steps in blocks of a pool that nobody uses yet; what it writes there belongs to no sequence."""

    def __init__(
        self,
        runner: LanguageRunner,
        *,
        num_blocks: int,
        block_size: int,
        num_position_axes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_position_axes = num_position_axes

    def seconds(self, shape: StepShape, least_s: float = 0.0) -> float:
        """The median time of a step (see :func:`median_s`). The pool must have blocks for all contexts."""
        return median_s(self.step(shape), self._clock, least_s)

    def step(self, shape: StepShape) -> Callable[[], object]:
        """Return a callable that computes the step, each time the same."""
        blocks = iter(range(1, self._num_blocks))
        decodes = [self._sequence(blocks, context - 1, 1) for context in shape.contexts]
        for sequence in decodes:
            sequence.output_ids.append(sequence.prompt_ids.pop())
        prefills = [(self._sequence(blocks, start, count), count) for start, count in shape.chunks]
        output = ScheduleOutput(decodes=decodes, prefills=prefills)
        return lambda: self._runner.step(output, {})

    def _sequence(self, blocks: Iterator[int], num_computed: int, count: int) -> Sequence:
        length = num_computed + count
        return Sequence(
            request_id="profile",
            prompt_ids=[0] * length,
            sampling=SamplingParams(seed=0, temperature=0.0),
            max_tokens=1,
            positions=torch.arange(length).expand(self._num_position_axes, -1),
            num_computed=num_computed,
            blocks=[next(blocks) for _ in range(-(-length // self._block_size))],
            state=SequenceState.RUNNING,
        )


def encode_seconds(
    tower: Tower,
    family: Family,
    num_images: int,
    *,
    side: int = IMAGE_SIDE,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median time to encode a batch of square images."""
    inputs = family.preprocess(blank((side, side)))
    return median_s(lambda: tower.encode([inputs] * num_images), clock)


def median_s(
    run: Callable[[], object], clock: Callable[[], float] = time.perf_counter, least_s: float = 0.0
) -> float:
    """The median time of ``run``, whose results are on the host when it returns. Its first run is not counted.

    Args:
        least_s: seconds for which it runs uncounted, and again to be counted. On a CPU a small model's decode
            takes half as long again behind something else as behind its like, some tens of times.
    """
    _times(run, clock, 1, least_s)
    return statistics.median(_times(run, clock, _RUNS, least_s))


def _times(run: Callable[[], object], clock: Callable[[], float], count: int, least_s: float) -> list[float]:
    """Seconds of each run, ``count`` at least."""
    times: list[float] = []
    while len(times) < count or sum(times) < least_s:
        start = clock()
        run()
        times.append(clock() - start)
    return times


def cache_dir(environment: Mapping[str, str]) -> Path:
    """The directory ``EPD_SERVE_CACHE``, else ``epd-serve`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := environment.get("EPD_SERVE_CACHE"):
        return Path(own).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "epd-serve"


class Measurements:
    """Measured seconds by key, for one combination of model, device and software; kept in a file.

    A file that is damaged or cannot be written costs a line in the log and the time to measure again.

    Args:
        about: all that the times depend on, as JSON values; it names the file.
    """

    def __init__(self, directory: Path, about: Mapping[str, str | int | None]) -> None:
        self._about = dict(about)
        name = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()
        self.file = directory / "profiles" / f"{name}.json"
        self._seconds: dict[str, float] = {}
        self._is_new = False
        try:
            self._seconds = self._read(json.loads(self.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("the profile %s cannot be used and is measured again: %s", self.file, error)

    def _read(self, content: object) -> dict[str, float]:
        if not isinstance(content, dict) or content.get("about") != self._about:
            raise ValueError("it is about something else")
        seconds = content.get("seconds")
        if not isinstance(seconds, dict) or not all(
            isinstance(value, float) and value > 0 for value in seconds.values()
        ):
            raise ValueError("it holds something other than seconds")
        return seconds

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The known seconds of ``key``; else those that ``measure`` returns, which are then known."""
        if key not in self._seconds:
            self._seconds[key] = measure()
            self._is_new = True
        return self._seconds[key]

    def save(self) -> None:
        """Write the file where there are new measurements, all of it or nothing."""
        if not self._is_new:
            return
        content = json.dumps({"about": self._about, "seconds": self._seconds}, indent=1)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.file.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(content)
                Path(temporary).replace(self.file)
            except BaseException:
                Path(temporary).unlink()
                raise
        except OSError as error:
            logger.warning("the profile cannot be kept in %s: %s", self.file.parent, error)
        self._is_new = False
