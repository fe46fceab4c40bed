"""The deployment file read again while the gateway runs: on SIGHUP, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Reloader:
    """Calls ``apply`` when the file has changed, or when told to.

    Args:
        apply: reads the file and takes it over, all of it or nothing. Raises ValueError for a file that is
            refused; that is logged, and everything stays as it was.
        look_s: how often the file's time and size are looked at.
    """

    def __init__(self, file: Path, apply: Callable[[], None], *, look_s: float = _LOOK_S) -> None:
        self._file = file
        self._apply = apply
        self._look_s = look_s
        self._asked = asyncio.Event()
        self._seen: tuple[int, int] | None = None

    def ask(self) -> None:
        """Read the file now, whether it has changed or not. SIGHUP does it too."""
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        with suppress(ValueError, RuntimeError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.ask)
        self._seen = self._stamp()
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._asked.wait()
            except TimeoutError:
                if self._stamp() == self._seen:
                    continue
            self._asked.clear()
            self.reload()

    def reload(self) -> bool:
        """Whether the file was taken over."""
        try:
            self.take()
        except (ValueError, OSError) as error:
            logger.error("%s is refused, the configuration stays as it was: %s", self._file, error)
            return False
        logger.info("%s was read again", self._file)
        return True

    def take(self) -> None:
        """Take the file over. Raises ValueError or OSError for one that is refused: all stays as it was then."""
        self._seen = self._stamp()  # before the look at it: what is written meanwhile is read again
        self._apply()

    def _stamp(self) -> tuple[int, int] | None:
        """None while there is no file, as there is for a moment when an editor replaces it."""
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size
