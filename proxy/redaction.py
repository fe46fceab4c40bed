"""Keeps secrets out of log records, whoever writes them and whatever handler prints them."""

from __future__ import annotations

import logging
import re
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
