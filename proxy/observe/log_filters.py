"""Limit the rate of log records that clients can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Most texts counted at a time, so that varying texts cannot fill memory.
_MAX_TEXTS = 1000


class RateLimit(logging.Filter):
    """Passes ``most`` records per message template in ``every_s``; the next period begins with the number dropped.

    Records with a traceback always pass.
    """

    def __init__(
        self, most: int = 10, every_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most = most
        self._every_s = every_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # text → start of the period, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            return True
        text, now_s = str(record.msg), self._clock()
        since_s, number = self._seen.get(text, (now_s, 0))
        if now_s - since_s >= self._every_s:
            if number > self._most:
                record.msg = f"{text} ({number - self._most} similar messages were dropped)"
            since_s, number = now_s, 0
        if len(self._seen) >= _MAX_TEXTS:
            self._seen.clear()
        self._seen[text] = since_s, number + 1
        return number < self._most
