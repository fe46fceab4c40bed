"""Measured seconds, cached on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from device.base import BareDevice
from epd_serve import __version__
from epd_serve.config import InstanceOptions

logger = logging.getLogger(__name__)

#: Side, in pixels, of the square images used to measure encodes.
IMAGE_SIDE = 448
#: Time limit for encodes, and again for steps: an SLO adds up to 10 s to a start, plus the last measurements.
MEASURE_S = 5.0
#: Maximum cores in use by other processes during a cached measurement.
_MOST_OTHERS = 0.25


def measurements(options: InstanceOptions, device: BareDevice, fingerprint: str, torch: str = "") -> Measurements:
    """Return the cached measurements of an equal instance; ``fingerprint`` identifies model and dtype."""
    about: dict[str, str | int | None] = {
        "role": str(options.role),  # instances of different roles start at once and measure different things
        "model": fingerprint,
        "device": f"{device.type} {device.description}",
        "threads": options.threads,
        "cores": device.cores,
        "share": None if options.device_share is None else f"{options.device_share.share:g}",
        "tower_share": None if options.tower_share is None else f"{options.tower_share:g}",
        "max_num_seqs": options.sizes.max_num_seqs,
        "block_size": options.tokens_per_block,
        "epd_serve": __version__,
        "torch": torch,
    }
    others_s = cpu_seconds_of_others if device.type == "cpu" else lambda: 0.0
    # instances on one accelerator start, and measure, at the same time
    is_alone = device.type == "cpu" or (options.device_share is None and options.memory_share is None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "epd-serve"
    cache = Path(os.environ.get("EPD_SERVE_CACHE") or cache).expanduser()
    return Measurements(cache if is_alone else None, about, others_s=others_s)


def cpu_seconds_of_others() -> float:
    """Return the CPU seconds that other processes have used on this machine since it started."""
    times, own = psutil.cpu_times(), os.times()
    return times.user + times.system - own.user - own.system


class Measurements:
    """Measured seconds by key, for one combination of model, device and software; cached in a file.

    Keys are measured for up to ``MEASURE_S`` seconds from the first new measurement until :meth:`save`. Times
    measured while other processes used the cores are valid for this process only and are not cached.

    Args:
        directory: directory of the file; None: no file.
        about: everything that the times depend on, as JSON values; determines the file name.
        others_s: CPU seconds used by other processes of this machine.
    """

    def __init__(
        self,
        directory: Path | None,
        about: Mapping[str, str | int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        others_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._about = dict(about)
        self._clock, self._others_s = clock, others_s
        self._seconds: dict[str, float] = {}
        self._begun: tuple[float, float] | None = None
        self.file: Path | None = None
        if directory is None:
            return
        name = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()
        self.file = directory / "profiles" / f"{name}.json"
        try:
            self._seconds = json.loads(self.file.read_text(encoding="utf-8"))["seconds"]
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("the profile %s is invalid and will be measured again: %s", self.file, error)

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """Return the cached seconds of ``key``, otherwise those of ``measure``, or infinity when time is up."""
        if key not in self._seconds:
            if self._begun is None:
                logger.info(
                    "measuring for the SLO for up to %g s; cached in %s: remove it to measure again",
                    MEASURE_S,
                    self.file or "no file",
                )
                self._begun = self._clock(), self._others_s()
            elif self._clock() - self._begun[0] > MEASURE_S:
                return math.inf
            self._seconds[key] = measure()
        return self._seconds[key]

    def save(self) -> None:
        """Write the file atomically if there are new measurements undisturbed by other processes."""
        begun, self._begun = self._begun, None
        if begun is None or self.file is None:
            return
        if self._others_s() - begun[1] > _MOST_OTHERS * (self._clock() - begun[0]):
            logger.warning("other processes disturbed the measurements, which are not cached for the next start")
            return
        content = json.dumps({"about": self._about, "seconds": self._seconds}, indent=1)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(content, encoding="utf-8")
            part.replace(self.file)
        except OSError as error:
            logger.warning("the profile cannot be written to %s: %s", self.file.parent, error)
