"""Builds vLLM's configuration from command lines, as ``vllm serve`` does; run by vLLM's Python.

Standard input has a JSON list of commands, each with its arguments after ``serve`` and its variables. The answer's
last line is a JSON list with parts of each configuration.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser


def build(arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    os.environ.update(variables)
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    given.model = given.model_tag
    validate_parsed_serve_args(given)
    config = AsyncEngineArgs.from_cli_args(given).create_engine_config()
    kv, ec = config.kv_transfer_config, config.ec_transfer_config
    return {
        "device": config.device_config.device_type,
        "worker": config.parallel_config.worker_cls,
        "ranks": config.parallel_config.world_size,
        "dtype": str(config.model_config.dtype),
        "block_size": config.cache_config.block_size,
        "memory": config.cache_config.gpu_memory_utilization,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "eager": config.model_config.enforce_eager,
        "kv": kv and [KVConnectorFactory.get_connector_class(kv).__module__, kv.kv_role, kv.kv_port],
        "kv_extra": kv and kv.kv_connector_extra_config,
        "ec": ec and [ECConnectorFactory.get_connector_class(ec).__name__, ec.ec_role],
    }


if __name__ == "__main__":
    load_general_plugins()
    print(json.dumps([build(*command) for command in json.load(sys.stdin)]))
