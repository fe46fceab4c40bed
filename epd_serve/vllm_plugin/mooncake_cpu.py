"""vLLM's Mooncake KV connector on hosts without an accelerator."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

if not torch.accelerator.is_available():
    # It asks for the index of the current accelerator to name its NIC by.
    torch.accelerator.current_device_index = lambda: 0
if hasattr(torch.cpu, "_init_amx"):
    # D's first attention may be that of a decode step, whose tiles nothing has asked the kernel for yet.
    torch.cpu._init_amx()

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)


class MooncakeCPUConnector(MooncakeConnector):
    """``kv_connector: MooncakeCPUConnector``. Slowed down by ``link_bytes_per_s`` and ``link_latency_s``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        bandwidth, latency_s = extra.get("link_bytes_per_s"), extra.get("link_latency_s", 0.0)
        if self.connector_worker is not None and (bandwidth or latency_s):
            self.connector_worker.engine = _SlowEngine(self.connector_worker.engine, bandwidth, latency_s)


class _SlowEngine:
    """A transfer engine over one slow link to each peer, as :class:`epd_serve.transfer.shaped.ShapedTransport`."""

    def __init__(self, engine: Any, bytes_per_s: float | None, latency_s: float) -> None:
        self._engine = engine
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_write(self, peer: str, sources: Any, targets: Any, sizes: Any) -> Any:
        start = time.monotonic()
        result = self._engine.batch_transfer_sync_write(peer, sources, targets, sizes)
        with self._lock:
            done = max(start + self._latency_s, self._free_at.get(peer, 0.0)) + sum(sizes) * self._s_per_byte
            self._free_at[peer] = done
        time.sleep(max(0.0, done - time.monotonic()))
        return result
