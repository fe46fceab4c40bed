"""epd-serve's connectors inside vLLM's processes: encoder output by content hash, KV in groups of layers.

vLLM loads them by name (``--ec-transfer-config``, ``--kv-transfer-config``). No other part imports vLLM.
"""

from __future__ import annotations

import os


def register() -> None:
    """Entry point ``vllm.general_plugins``, in each of vLLM's processes: makes the connectors known by their names
    alone, and has processes on a CPU spin less."""
    from epd_serve.backends.vllm_command import SPIN_VARIABLE
    from epd_serve.vllm_plugin.spinning import share_threads, spin_for

    if spin_s := os.environ.get(SPIN_VARIABLE):
        spin_for(float(spin_s))
        share_threads()
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for factory, name, module in (
        (ECConnectorFactory, "StoreFeatureConnector", "features"),
        (KVConnectorFactory, "GroupedKVConnector", "kv"),
    ):
        if name not in factory._registry:
            factory.register_connector(name, f"{__name__}.{module}", name)
