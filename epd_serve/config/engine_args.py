"""Flags of ``vllm serve`` in a deployment file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

ArgumentValue = bool | int | float | str

#: Flags that the topology and other keys decide, with the key to use in their place.
_DECIDED = {
    "model": "model",
    "host": "instances.host",
    "port": "instances.base_port",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "generation_config": "generation_config",
    "tensor_parallel_size": "the topology's @tp",
    "max_model_len": "instances.max_model_len",
    "max_num_seqs": "instances.max_num_seqs",
    "max_num_batched_tokens": "instances.max_num_batched_tokens",
    "block_size": "instances.block_size",
    "num_gpu_blocks_override": "instances.num_blocks",
    "kv_cache_memory_bytes": "instances.kv_cache_bytes",
    "gpu_memory_utilization": "instances.memory_share, or instances.share for instances in parentheses",
    "ec_transfer_config": "vllm.features",
    "kv_transfer_config": "vllm.kv",
    "api_key": "gateway.api_key",
    "uds": "instances.base_port",
    "data_parallel_size": "a count in the topology, as in 2P",
    "pipeline_parallel_size": "the topology's @tp",
}


def check_engine_args(arguments: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    """Arguments of ``vllm serve`` by name without the dashes, ``_`` for ``-``. Raises ValueError."""
    checked: dict[str, ArgumentValue] = {}
    for name, value in arguments.items():
        plain = name.removeprefix("--").replace("-", "_")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", plain):
            raise ValueError(f"{name!r} is no flag of vllm serve; write its name, as in max_num_seqs: 64")
        if plain in _DECIDED:
            raise ValueError(f"{name} is not set here; use {_DECIDED[plain]}")
        if plain in checked:
            raise ValueError(f"{name} is set twice")
        checked[plain] = value
    return checked


EngineArgs = Annotated[dict[str, ArgumentValue], AfterValidator(check_engine_args)]
