"""vLLM's Mooncake KV connector on hosts without an accelerator."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.accelerator.is_available():
    # the connector uses the index of the current accelerator to name its NIC
    torch.accelerator.current_device_index = lambda: 0
if hasattr(torch.cpu, "_init_amx"):
    # D's first attention may be a decode step, before anything else has requested AMX tiles from the kernel
    torch.cpu._init_amx()

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

from epd_serve.protocol.addresses import is_loopback

_BootstrapServer = mooncake_connector.MooncakeBootstrapServer


def _start_bootstrap(host: str, port: int) -> Any:
    """Make P's directory of workers listen on loopback instead of 0.0.0.0 if all instances are on this host."""
    own = os.environ.get("VLLM_HOST_IP", "")
    return _BootstrapServer(own if is_loopback(own) else host, port)


mooncake_connector.MooncakeBootstrapServer = _start_bootstrap


class MooncakeCPUConnector(mooncake_connector.MooncakeConnector):
    """``kv_connector: MooncakeCPUConnector``."""
