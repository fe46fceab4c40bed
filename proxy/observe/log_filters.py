"""Log records without secrets, whoever writes them, and few of those lines that clients can cause."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable

_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"(data:[\w.+/;=-]{0,100}?base64,)([A-Za-z0-9+/=_%-]+)"),
        lambda m: f"{m[1]}<{len(m[2])} characters>",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]{6,}"), r"\1 ***"),
    (
        re.compile(
            r"(?i)\b((?:authorization|x-api-key|api[_-]key)['\"]?\s*[:=,]\s*b?['\"]?)(?!bearer |basic )[^\s'\",;]+"
        ),
        r"\1***",
    ),
    (re.compile(r"\b(epd|sk)-[A-Za-z0-9_-]{16,}"), r"\1-***"),
    (re.compile(r"://[^/?#\s@]*@"), "://***@"),
)


class Redactor:
    """Text without what looks like a secret, and without those that are known."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        known = sorted({re.escape(secret) for secret in secrets if secret}, key=len, reverse=True)
        self._known = re.compile("|".join(known)) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub("***", text)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        return text


def redact_logs(secrets: Iterable[str | None] = ()) -> Callable[[], None]:
    """All log records of the process are redacted from now on, tracebacks included. Returns what undoes it."""
    redact = Redactor(secrets)

    class RedactedRecord(logging.LogRecord):
        _exc_text: str | None = None

        def getMessage(self) -> str:
            return redact(super().getMessage())

        @property
        def exc_text(self) -> str | None:
            return self._exc_text

        @exc_text.setter
        def exc_text(self, text: str | None) -> None:
            self._exc_text = None if text is None else redact(text)

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(RedactedRecord)
    return lambda: logging.setLogRecordFactory(before)


class Sparing(logging.Filter):
    """A filter: ``most`` records with one text, but for what is filled in, pass in ``every_s``; the first one of
    the next period says how many were left out. Records with a traceback pass always."""

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
        self._seen[text] = since_s, number + 1
        return number < self._most


class Episodes:
    """Failures that many requests have, each told once for as long as it lasts: until ``quiet_s`` without it."""

    def __init__(self, quiet_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet_s = quiet_s
        self._clock = clock
        self._last_s: dict[str, float] = {}

    def is_new(self, failure: str) -> bool:
        """Return whether an episode of the failure begins; either way it lasts from now on."""
        now_s = self._clock()
        self._last_s = {text: at for text, at in self._last_s.items() if now_s - at < self._quiet_s}
        begins = failure not in self._last_s
        self._last_s[failure] = now_s
        return begins
