"""vLLM's Mooncake KV connector on hosts without an accelerator."""

from __future__ import annotations

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
    """``kv_connector: MooncakeCPUConnector``."""
