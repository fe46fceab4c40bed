"""Mooncake's keys in a deployment file, and the part of them that each instance gets."""

from __future__ import annotations

import pytest

from epd_serve.config import DeploymentConfig, parse_config

KV = "instances: {kv_transfer: {transport: mooncake}}"
STORE = "feature_store: mooncake"


@pytest.mark.parametrize(
    ("text", "uses", "starts_master"),
    [
        ("", False, False),
        ("mooncake: {devices: mlx5_0}", False, False),
        (KV, True, False),
        (STORE, True, True),
        (f"{STORE}\nmooncake: {{master: 'store:50051'}}", True, False),
        (f"topology: EPD\n{KV}", True, False),
    ],
)
def test_a_master_is_started_where_a_store_is_asked_for_and_none_is_named(
    text: str, uses: bool, starts_master: bool
) -> None:
    config = parse_config(text)
    assert (config.uses_mooncake, config.starts_master) == (uses, starts_master)


@pytest.mark.parametrize(
    ("named", "started", "told"), [("store:1", "here:2", "store:1"), (None, "here:2", "here:2")]
)
def test_every_setting_reaches_the_instance(named: str | None, started: str, told: str) -> None:
    mooncake = {"master": named, "devices": "mlx5_0"}
    config = DeploymentConfig.model_validate({"feature_store": "mooncake", "mooncake": mooncake})
    options = config.options_for(config.placement()[0], device="cpu", port=1, threads=1, master=started)
    assert (options.feature_store, options.mooncake.master) == ("mooncake", told)
    assert options.mooncake.devices == "mlx5_0"
