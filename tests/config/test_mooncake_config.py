"""Mooncake's keys in a deployment file, and the part of them that each instance gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_serve.config import DeploymentConfig, load_config, parse_config

KV = "instances: {kv_transfer: {transport: mooncake}}"
STORE = "feature_store: mooncake"


@pytest.mark.parametrize(
    ("text", "uses", "starts_master"),
    [
        ("", False, False),
        ("mooncake: {protocol: rdma}", False, False),
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
    ("text", "message"),
    [
        ("mooncake: {master: store}", "'store' is no address of a master; write host:port"),
        ("mooncake: {master: 'http://store:1'}", "no address of a master"),
        ("mooncake: {protocol: infiniband}", "mooncake.protocol"),
        ("mooncake: {protocol: nvlink}", "nvlink moves GPU memory.* write auto, tcp or rdma"),
        (f"{STORE}\ninstances: {{feature_cache_bytes: 8MiB}}", "of E is 8388608, .* write 16MiB or more"),
        (f"{STORE}\ntopology: EP-D\nroles: {{EP: {{feature_cache_bytes: 1MB}}}}", "of EP is 1000000"),
        ("mooncake: {mastr: 'store:1'}", "mooncake.mastr"),
        ("feature_store: redis", "feature_store"),
        ("roles: {P: {kv_transfer: {transport: mooncake}}}", "mooncake for P alone.* the same: D, P"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(text)


@pytest.mark.parametrize(
    "text",
    [
        "instances: {feature_cache_bytes: 8MiB}",
        f"{STORE}\nroles: {{P: {{feature_cache_bytes: 8MiB}}}}",
        f"{STORE}\ninstances: {{feature_cache_bytes: 16MiB}}",
    ],
)
def test_only_what_is_lent_to_the_store_has_a_least_size(text: str) -> None:
    parse_config(text)


def test_a_role_without_a_language_model_has_no_kv_to_move() -> None:
    assert parse_config("roles: {E: {kv_transfer: {transport: mooncake}}}").uses_mooncake


@pytest.mark.parametrize(
    ("named", "started", "told"), [("store:1", "here:2", "store:1"), (None, "here:2", "here:2")]
)
def test_every_setting_reaches_the_instance(named: str | None, started: str, told: str) -> None:
    mooncake = {"master": named, "protocol": "rdma", "devices": "mlx5_0"}
    config = DeploymentConfig.model_validate({"feature_store": "mooncake", "mooncake": mooncake})
    options = config.options_for(config.placement()[0], device="cpu", port=1, threads=1, master=started)
    assert (options.feature_store, options.mooncake.master) == ("mooncake", told)
    assert (options.mooncake.protocol, options.mooncake.devices) == ("rdma", "mlx5_0")


def test_the_example_asks_for_both() -> None:
    config = load_config(Path(__file__).parents[2] / "deploy" / "cpu-mooncake.yaml")
    assert config.starts_master
    assert config.settings_for("P").kv_transfer.transport == "mooncake"
