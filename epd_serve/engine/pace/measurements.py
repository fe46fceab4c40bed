"""Measured seconds that are kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

#: Encodes are measured with square images of this side, in pixels.
IMAGE_SIDE = 448


def cache_dir(environment: Mapping[str, str]) -> Path:
    """The directory ``EPD_SERVE_CACHE``, else ``epd-serve`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := environment.get("EPD_SERVE_CACHE"):
        return Path(own).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "epd-serve"


class Measurements:
    """Measured seconds by key, for one combination of model, device and software; kept in a file.

    A file that is damaged or cannot be written costs a line in the log and the time to measure again.

    Args:
        directory: of the file; None: there is none.
        about: all that the times depend on, as JSON values; it names the file.
    """

    def __init__(self, directory: Path | None, about: Mapping[str, str | int | None]) -> None:
        self._about = dict(about)
        self._seconds: dict[str, float] = {}
        self._is_new = False
        self.file: Path | None = None
        if directory is None:
            return
        name = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()
        self.file = directory / "profiles" / f"{name}.json"
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

    def __contains__(self, key: str) -> bool:
        return key in self._seconds

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The known seconds of ``key``; else those that ``measure`` returns, which are then known."""
        if key not in self._seconds:
            self._seconds[key] = measure()
            self._is_new = True
        return self._seconds[key]

    def save(self) -> None:
        """Write the file where there are new measurements, all of it or nothing."""
        if not self._is_new or self.file is None:
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
