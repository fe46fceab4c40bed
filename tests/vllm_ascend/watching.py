"""A KV connector that watches which hooks the vendor's worker calls, and with what."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

#: ``caches``: of each layer, its parts' shapes and addresses. ``hooks``: (name, layer, what came with it).
SEEN: dict[str, list[Any]] = {"caches": [], "hooks": []}


class WatchingConnector(KVConnectorBase_V1):
    """Hands nothing on."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        SEEN["caches"] = [
            [name, type(parts).__name__, [[list(part.shape), part.data_ptr()] for part in parts]]
            for name, parts in kv_caches.items()
        ]

    def start_load_kv(self, forward_context: Any, **given: Any) -> None:
        SEEN["hooks"].append(["start_load_kv", "", ""])

    def wait_for_layer_load(self, layer_name: str) -> None:
        SEEN["hooks"].append(["wait_for_layer_load", layer_name, ""])

    def on_kv_cache_written(self, layer_name: str) -> None:
        SEEN["hooks"].append(["on_kv_cache_written", layer_name, ""])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **given: Any) -> None:
        SEEN["hooks"].append(["save_kv_layer", layer_name, type(kv_layer).__name__])

    def wait_for_save(self) -> None:
        SEEN["hooks"].append(["wait_for_save", "", ""])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
