"""The access log: one line of JSON for each request, written in the background."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from proxy.observe.record import RequestRecord

logger = logging.getLogger(__name__)

#: Lines that may wait for a disk; those that come then are dropped and counted.
MAX_WAITING = 65536
_INTERVAL_S = 0.2
_BATCH = 512
STDOUT = "-"
_encoder = msgspec.json.Encoder()


class StageLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stage at one instance; ``start_ms`` counts from the request's arrival."""

    stage: str
    start_ms: float
    ms: float
    instance: str = ""
    item: str = ""
    feature: str = ""
    failed: bool = False


class Line(msgspec.Struct, frozen=True):
    """A request, as it is logged. Times are in milliseconds. What is not known is null."""

    time: str
    request_id: str
    trace_id: str
    key: str | None
    endpoint: str
    model: str | None
    modality: str
    images: int
    videos: int
    sounds: int
    pixels: tuple[int, ...]
    media_bytes: int
    stream: bool
    status: int
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float
    queue_ms: float
    prefill: str | None
    decode: str | None
    stages: list[StageLine]
    retries: int
    continuations: int
    encode_retries: int


class AccessLog:
    """Takes requests that are over; never waits and never raises.

    A thread writes the lines; they are made at once, a few microseconds each: one that made hundreds at a time
    would hold up all streams for as long. Before each batch it looks whether the file is still the one of that
    name, and opens it anew where it is not, so that a log may be moved away or removed at any time (logrotate
    without copytruncate).

    Attributes:
        num_written, num_dropped: lines so far.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """``target``: a file, or "-" for the standard output.

        Raises ValueError where it cannot be written.
        """
        self._path = None if str(target) == STDOUT else Path(target)
        self._max_waiting = max_waiting
        self._waiting: deque[bytes] = deque()
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
        self._writer = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._writer.start()

    def put(self, record: RequestRecord) -> None:
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
        else:
            self._waiting.append(_encoder.encode(line_of(record, self._offset_s)) + b"\n")

    def close(self) -> None:
        """Write what is waiting. Idempotent."""
        self._stopping.set()
        self._writer.join()
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
            try:
                self._write(b"".join(batch))
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


@lru_cache(4)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def line_of(record: RequestRecord, wall_offset_s: float) -> Line:
    """``wall_offset_s`` leads from the monotonic clock to that of the wall."""
    arrived_ms = int((record.arrived_s + wall_offset_s) * 1e3)
    ttft_s, tpot_s = record.ttft_s, record.tpot_s
    return Line(
        f"{_second(arrived_ms // 1000)}.{arrived_ms % 1000:03d}Z",
        record.request_id,
        record.context.trace_id,
        record.key or None,
        record.endpoint,
        record.model or None,
        record.modality,
        record.num_media.get("image", 0),
        record.num_media.get("video", 0),
        record.num_media.get("audio", 0),
        record.pixels,
        sum(record.media_bytes.values()),
        record.streamed,
        record.status,
        record.error or None,
        record.finish_reason or None,
        record.prompt_tokens,
        record.output_tokens,
        None if ttft_s is None else round(1e3 * ttft_s, 3),
        None if tpot_s is None else round(1e3 * tpot_s, 3),
        round(1e3 * record.duration_s, 3),
        round(1e3 * record.queue_s, 3),
        record.prefill,
        record.decode,
        stages(record),
        record.retries,
        record.continuations,
        record.encode_retries,
    )


def stages(record: RequestRecord) -> list[StageLine]:
    """Return what was done where, in the order in which it began."""
    arrived_s = record.arrived_s
    return [
        StageLine(
            span.name,
            round(1e3 * (span.start_s - arrived_s), 3),
            round(1e3 * (span.end_s - span.start_s), 3),
            **span.attributes,  # type: ignore[arg-type]
        )
        for span in record.spans
    ]
