"""Trace files in the Trace Event Format, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from epd_serve.telemetry.span import Span

logger = logging.getLogger(__name__)

#: Limit of a file, so that a forgotten run does not fill the disk.
_MAX_BYTES = 1 << 30
#: Category of the spans of requests.
REQUEST = "request"
#: Metadata event by which the clocks of several hosts are joined.
CLOCK = "epd_serve_clock"


class TraceWriter:
    """Subscribes to a process's spans and writes them to ``DIRECTORY/NAME-PID.json``. Any thread may call it.

    The file is a JSON array. Each event is written at once and whole, so that the file of a killed process lacks
    only the closing bracket, which viewers do not need. A full disk ends only the trace. Times are microseconds of
    the monotonic clock, which all processes of a host share.

    Raises ValueError if the file cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pid = os.getpid()
        self.path = directory / f"{name}-{self._pid}.json"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ValueError(f"trace: cannot write {self.path}: {error.strerror}") from error
        self._is_open = True
        self._num_bytes = 0
        self._tracks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._put(b"[\n" + msgspec.json.encode(self._metadata("process_name", 0, {"name": name})))
        offset_us = round((wall_clock() - clock()) * 1e6)
        self._write(self._metadata(CLOCK, 0, {"host": _host_id(), "wall_offset_us": offset_us}))

    def put(self, span: Span) -> None:
        """Write a span: a pair of events for a request, as these overlap, or one event for a track."""
        start = round(span.start_s * 1e6)
        duration = max(round(span.end_s * 1e6) - start, 0)
        common: dict[str, Any] = {"name": span.name, "pid": self._pid, "ts": start}
        arguments = dict(span.attributes)
        if span.request_id:
            item = str(arguments.get("item", ""))[:12]
            common |= {"cat": REQUEST, "tid": 0, "id": f"{span.request_id}/{item}" if item else span.request_id}
            begin = {"ph": "b", **common, "args": {"request": span.request_id, **arguments}}
            self._write(begin, {"ph": "e", **common, "ts": start + duration})
        else:
            track = self._track(str(arguments.pop("track")))
            self._write({"ph": "X", **common, "tid": track, "dur": duration, "args": arguments})

    def close(self) -> None:
        """End the array. Idempotent."""
        self._put(b"\n]\n", last=True)

    def _track(self, name: str) -> int:
        number = self._tracks.get(name)
        if number is None:
            with self._lock:
                number = self._tracks.setdefault(name, len(self._tracks) + 1)
            self._write(self._metadata("thread_name", number, {"name": name}))
        return number

    def _metadata(self, name: str, track: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": track, "args": arguments}

    def _write(self, *events: dict[str, Any]) -> None:
        self._put(b"".join(b",\n" + msgspec.json.encode(event) for event in events))

    def _put(self, data: bytes, *, last: bool = False) -> None:
        with self._lock:
            if not self._is_open:
                return
            try:
                if self._num_bytes + len(data) > _MAX_BYTES:
                    raise OSError(f"it has reached {self._num_bytes} bytes")
                self._num_bytes += os.write(self._file, data)
            except OSError as error:
                logger.warning("the trace %s ends here: %s", self.path, error)
                last = True
            if last:
                self._is_open = False
                with suppress(OSError):  # reports a full disk again
                    os.close(self._file)


def _host_id() -> str:
    """Return an id shared by all processes with the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
