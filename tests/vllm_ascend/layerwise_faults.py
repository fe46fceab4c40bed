"""A write of vllm-ascend's layer-wise connector fails; run by vLLM's Python.

The answer has what P then tells D of each request, by whether its KV has come, and the requests that D's worker
reports to its scheduler once it was told of a failure.
"""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace as Fields
from typing import Any

from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as vendor


class Sender(vendor.KVCacheSendingLayerThread):
    def get_transfer_meta(self, *given: Any) -> tuple[list[int], list[int], list[int]]:
        return [1], [2], [3]


def told_by_p() -> dict[str, bool]:
    """Two requests of one step go to one D, and the write of both fails at the last layer."""
    told: dict[str, bool] = {}

    def callback(request: str, meta: Any, group: int, trans_flag: bool) -> None:
        told[request] = trans_flag

    given: dict[str, Any] = dict.fromkeys(
        (
            "kv_cache_config",
            "kv_cache_specs",
            "attn_resharding_group_idx",
            "k_buffer",
            "v_buffer",
            "resharding_stream",
        )
    )
    sender = Sender(
        **given,
        engine=Fields(batch_transfer_sync_write=lambda *write: -1),
        vllm_config=Fields(cache_config=Fields(mamba_cache_mode=None), speculative_config=None),
        total_layers=1,
        ready_event=threading.Event(),
        tp_size=1,
        tp_rank=0,
        pd_head_ratio=1,
        num_head_replica=1,
        layer_metadata={"last": Fields(tensor_group_idx=[0])},
        use_mla=False,
        use_attn_mamba_hybrid=False,
        enable_kv_quant=False,
        enable_c8_quant=False,
        callback_func=callback,
    )
    request = Fields(remote_host="127.0.0.1", remote_te_rpc_port=1, chunk_finish=True)
    sender._transfer_kv_cache(
        vendor.SendTask(
            send_request={"first": request, "second": request},
            wait_event=Fields(synchronize=_nothing),
            layer_idx=0,
            layer_name="last",
        )
    )
    return told


def reported_by_d() -> list[str]:
    receiver = vendor.KVCacheRecvingLayerThread(0, 1, 1, 1, "d0", Fields(), threading.Event())
    receiver.update_failed_task("first")
    worker = vendor.MooncakeLayerwiseConnectorWorker.__new__(vendor.MooncakeLayerwiseConnectorWorker)
    worker.kv_recv_layer_thread = receiver
    worker.vllm_config = Fields(kv_transfer_config=Fields(is_kv_consumer=True))
    worker.request_map = {"first": "first-12345678"}
    worker.virtual_request = set()
    worker._recving_metadata, worker._invalid_block_ids = {}, set()
    return [one for some in worker.get_finished() for one in some]


def _nothing() -> None: ...


if __name__ == "__main__":
    print(json.dumps({"told": told_by_p(), "reported": reported_by_d()}))
