"""epd-serve's connector for encoder output inside vLLM's processes; no other part imports vLLM.

vLLM loads it by name (``--ec-transfer-config``).
"""

from __future__ import annotations

import os


def register() -> None:
    """Register the connector by its name, and have processes on a CPU spin less.

    This is the entry point ``vllm.general_plugins``, which each of vLLM's processes calls.
    """
    from epd_serve.backends.vllm_command import SPIN_VARIABLE
    from epd_serve.vllm_plugin.spinning import share_threads, spin_for

    if spin_s := os.environ.get(SPIN_VARIABLE):
        spin_for(float(spin_s))
        share_threads()
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    name = "StoreFeatureConnector"
    if name not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(name, f"{__name__}.features", name)
