"""Settings of gateways as a deployment file would have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epd_serve.config import DeploymentConfig
from epd_serve.config.gateway import AdminConfig
from epd_serve.config.keys import hash_key
from proxy.settings import GatewaySettings

#: Beside the keys of the section ``gateway``.
_OF_THE_FILE = ("cluster_key", "elastic", "instances", "restart", "slo", "topology", "trace")


def gateway_settings(
    *, poll_interval_s: float = 0.05, startup_wait_s: float = 60.0, host: str = "127.0.0.1", **options: Any
) -> GatewaySettings:
    """``options``: keys of the section ``gateway``, some of the whole file, and a plain ``api_key``."""
    if (key := options.pop("api_key", None)) is not None:
        options["api_keys"] = ({"name": "plain", "hash": hash_key(key)}, *options.get("api_keys", ()))
    whole = {key: options.pop(key) for key in _OF_THE_FILE if key in options}
    options["media"] = {"allow_private": True, **options.get("media", {})}
    settings = GatewaySettings.of(DeploymentConfig.model_validate({**whole, "gateway": options}), host)
    return replace(settings, poll_interval_s=poll_interval_s, startup_wait_s=startup_wait_s)


def admin_plane(host: str = "127.0.0.1", port: int = 0, key: str | None = None) -> AdminConfig:
    """An admin plane at a free port."""
    return AdminConfig.model_construct(host=host, port=port, key=key)
