"""epd-serve's EC connector inside vLLM's processes, loaded by ``--ec-transfer-config``.

No other part imports vLLM.
"""

from __future__ import annotations

import os


def register() -> None:
    """Register the connector, and reduce spinning on a CPU.

    This is the entry point ``vllm.general_plugins``, called in every vLLM process.
    """
    from epd_serve.backends.vllm_command import SPIN_VARIABLE
    from epd_serve.vllm_plugin.spinning import spin_for

    if spin_s := os.environ.get(SPIN_VARIABLE):
        spin_for(float(spin_s))
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    name = "StoreFeatureConnector"
    if name not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(name, f"{__name__}.features", name)
