"""The access log: one JSON line per request, written by a thread."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from logging.handlers import QueueListener, WatchedFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import Any

import msgspec

from proxy.observe.record import RequestRecord

#: Most lines waiting for a slow disk; further ones are dropped.
_MAX_WAITING = 65536
_encode = msgspec.json.Encoder().encode
#: Wall clock minus monotonic clock.
_WALL_OFFSET_S = time.time() - time.monotonic()


class AccessLog:
    """Writes finished requests to a file, or to standard output for "-".

    A moved or removed file is reopened (logrotate without copytruncate).
    """

    def __init__(self, target: str | Path) -> None:
        """Raises ValueError if the file cannot be written."""
        handler: logging.Handler = logging.StreamHandler(sys.stdout)
        if str(target) != "-":
            try:
                handler = WatchedFileHandler(target, encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"gateway.access_log: cannot write {target}: {error.strerror}; give a file in an existing "
                    "directory, or '-' for standard output"
                ) from error
        self._handler = handler
        self._queue: Queue[logging.LogRecord] = Queue(_MAX_WAITING)
        self._listener = QueueListener(self._queue, handler)
        self._listener.start()

    def put(self, record: RequestRecord) -> None:
        """Log a finished request without waiting."""
        line = logging.makeLogRecord({"msg": _encode(line_of(record)).decode()})
        try:
            self._queue.put_nowait(line)
        except Full:
            logging.getLogger(__name__).warning("the access log cannot keep up: lines are dropped")

    def close(self) -> None:
        """Write waiting lines."""
        self._listener.stop()
        with suppress(OSError):  # a full disk has been logged
            self._handler.close()


def line_of(record: RequestRecord) -> dict[str, Any]:
    """Return a request's log line: times in milliseconds, null for unknown values."""
    arrived_s = record.arrived_s + _WALL_OFFSET_S
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(arrived_s))
    return {
        "time": f"{second}.{int(arrived_s * 1e3) % 1000:03d}Z",
        "request_id": record.request_id,
        "trace_id": record.context.trace_id,
        "key": record.key or None,
        "endpoint": record.endpoint,
        "model": record.model or None,
        "modality": record.modality,
        "images": record.num_media.get("image", 0),
        "videos": record.num_media.get("video", 0),
        "sounds": record.num_media.get("audio", 0),
        "pixels": record.pixels,
        "media_bytes": sum(record.media_bytes.values()),
        "stream": record.streamed,
        "status": record.status,
        "error": record.error or None,
        "finish_reason": record.finish_reason or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.output_tokens,
        "ttft_ms": milliseconds(record.ttft_s),
        "tpot_ms": milliseconds(record.tpot_s),
        "duration_ms": milliseconds(record.duration_s),
        "queue_ms": milliseconds(record.queue_s),
        "prefill": record.prefill,
        "decode": record.decode,
        "stages": stages_of(record),
        "retries": record.retries,
        "continuations": record.continuations,
        "encode_retries": record.encode_retries,
    }


def stages_of(record: RequestRecord) -> list[dict[str, Any]]:
    """Return the stages in order of their start; ``start_ms`` counts from the request's arrival."""
    return [
        {
            "stage": span.name,
            "start_ms": milliseconds(span.start_s - record.arrived_s),
            "ms": milliseconds(span.end_s - span.start_s),
            **span.attributes,
        }
        for span in record.spans
    ]


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
