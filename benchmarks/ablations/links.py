"""Mooncake as it would be over a slower link: for experiments where memory is too fast to show anything."""

from __future__ import annotations

import threading
import time
from typing import Any


class SlowEngine:
    """A Mooncake transfer engine over one slow link to each peer, as ``ShapedTransport``."""

    def __init__(self, engine: Any, bytes_per_s: float | None, latency_s: float) -> None:
        self._engine = engine
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_read(self, peer: str, targets: Any, sources: Any, sizes: Any) -> Any:
        start = time.monotonic()
        result = self._engine.batch_transfer_sync_read(peer, targets, sources, sizes)
        with self._lock:
            done = max(start + self._latency_s, self._free_at.get(peer, 0.0)) + sum(sizes) * self._s_per_byte
            self._free_at[peer] = done
        time.sleep(max(0.0, done - time.monotonic()))
        return result
