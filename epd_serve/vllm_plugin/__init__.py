"""epd-serve's connectors inside vLLM's processes: encoder output by content hash, KV in groups of layers.

vLLM loads them by name (``--ec-transfer-config``, ``--kv-transfer-config``). No other part imports vLLM.
"""


def register() -> None:
    """Entry point ``vllm.general_plugins``: makes the connectors known by their names alone."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for factory, name, module in (
        (ECConnectorFactory, "StoreFeatureConnector", "features"),
        (KVConnectorFactory, "GroupedKVConnector", "kv"),
    ):
        if name not in factory._registry:
            factory.register_connector(name, f"{__name__}.{module}", name)
