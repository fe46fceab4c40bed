"""A filter for log records that clients can cause in any number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Texts counted at a time; a caller that varies them cannot fill the memory.
_MAX_TEXTS = 1000


class Sparing(logging.Filter):
    """Passes ``most`` records of one text, apart from its arguments, in ``every_s``; the first of the next period
    tells how many were left out. Records with a traceback always pass."""

    def __init__(
        self, most: int = 10, every_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most = most
        self._every_s = every_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # text → begin of the period, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            return True
        text, now_s = str(record.msg), self._clock()
        since_s, number = self._seen.get(text, (now_s, 0))
        if now_s - since_s >= self._every_s:
            if number > self._most:
                record.msg = f"{text} ({number - self._most} more like it since were left out)"
            since_s, number = now_s, 0
        if len(self._seen) >= _MAX_TEXTS:
            self._seen.clear()
        self._seen[text] = since_s, number + 1
        return number < self._most
