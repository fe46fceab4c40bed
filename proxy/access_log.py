"""The access log: one line of JSON for each request, written in the background."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from proxy.trail import Trail

logger = logging.getLogger(__name__)

#: Lines that may wait for a disk; those that come then are dropped and counted.
MAX_WAITING = 65536
_INTERVAL_S = 0.2
_BATCH = 512
STDOUT = "-"


class AccessLog:
    """Takes requests that are over; never waits and never raises.

    A thread writes them. Before each batch it looks whether the file is still the one of that name, and opens it
    anew where it is not, so that a log may be moved away or removed at any time (logrotate without copytruncate).

    Attributes:
        num_written, num_dropped: lines so far.
    """

    def __init__(self, target: str | Path, *, max_waiting: int = MAX_WAITING) -> None:
        """``target``: a file, or "-" for the standard output. Raises ValueError where it cannot be written."""
        self._path = None if str(target) == STDOUT else Path(target)
        self._max_waiting = max_waiting
        self._waiting: deque[Trail] = deque()
        self._offset_s = time.time() - time.monotonic()
        self._file: int | None = None
        self._is_failing = False
        self.num_written = 0
        self.num_dropped = 0
        if self._path is not None:
            try:
                self._reopen()
            except OSError as error:
                raise ValueError(
                    f"gateway.access_log: {self._path} cannot be written: {error.strerror}; "
                    "give a file in a directory that is there, or '-' for the standard output"
                ) from error
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def put(self, trail: Trail) -> None:
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
        else:
            self._waiting.append(trail)

    def close(self) -> None:
        """Write what is waiting. Idempotent."""
        self._stopping.set()
        self._thread.join()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            data = b"".join(msgspec.json.encode(entry(trail, self._offset_s)) + b"\n" for trail in batch)
            try:
                self._write(data)
            except OSError as error:
                self.num_dropped += len(batch)
                if not self._is_failing:
                    logger.warning("the access log %s cannot be written: %s", self._path or "on stdout", error)
                self._is_failing = True
            else:
                self.num_written += len(batch)
                self._is_failing = False

    def _write(self, data: bytes) -> None:
        if self._path is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        self._reopen()
        assert self._file is not None
        while data:
            data = data[os.write(self._file, data) :]

    def _reopen(self) -> None:
        """Have the file open that the path names now."""
        assert self._path is not None
        if self._file is not None:
            held = os.fstat(self._file)
            with suppress(FileNotFoundError):
                named = self._path.stat()
                if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                    return
            os.close(self._file)
            self._file = None
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def entry(trail: Trail, wall_offset_s: float) -> dict[str, Any]:
    """A line, before it is JSON. ``wall_offset_s`` leads from the monotonic clock to that of the wall.

    Times are in milliseconds; those of stages are counted from the request's arrival. What is not known is null.
    """
    return {
        "time": datetime.fromtimestamp(trail.arrived_s + wall_offset_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": trail.request_id,
        "trace_id": trail.context.trace_id,
        "key": trail.key or None,
        "endpoint": trail.endpoint,
        "model": trail.model or None,
        "modality": trail.modality,
        "images": trail.num_images,
        "media_bytes": trail.media_bytes,
        "stream": trail.streamed,
        "status": trail.status,
        "error": trail.error or None,
        "finish_reason": trail.finish_reason or None,
        "prompt_tokens": trail.prompt_tokens,
        "completion_tokens": trail.output_tokens,
        "ttft_ms": _ms(trail.ttft_s),
        "tpot_ms": _ms(trail.tpot_s),
        "duration_ms": _ms(trail.duration_s),
        "queue_ms": _ms(trail.queue_s),
        "prefill": trail.instance_of("prefill"),
        "decode": trail.instance_of("decode", "kv_transfer"),
        "stages": stages(trail),
        "retries": trail.retries,
        "continuations": trail.continuations,
        "encode_retries": trail.encode_retries,
    }


def stages(trail: Trail) -> list[dict[str, Any]]:
    """What was done where, in the order in which it began."""
    found = []
    for hop in trail.hops:
        stage: dict[str, Any] = {
            "stage": hop.stage,
            "start_ms": _ms(hop.start_s - trail.arrived_s),
            "ms": _ms((hop.end_s or hop.start_s) - hop.start_s),
        }
        if hop.instance:
            stage["instance"] = hop.instance
        if hop.item:
            stage["item"] = hop.item
        if hop.source:
            stage["feature"] = hop.source
        if hop.failed:
            stage["failed"] = True
        found.append(stage)
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
