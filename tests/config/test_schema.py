from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from epd_serve.config import (
    DeploymentConfig,
    InstanceOptions,
    InstanceSettings,
    deployment_schema,
    load_config,
    parse_config,
)
from epd_serve.config.shares import DeviceShare
from epd_serve.types import Role

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.glob("*.yaml"), key=lambda file: file.name)


def test_the_schema_is_valid_and_agrees_with_the_loader_on_bad_files() -> None:
    validator = jsonschema.Draft202012Validator(deployment_schema())
    validator.check_schema(deployment_schema())
    for text in ("gateway: {prot: 1}", "dtype: fp32", "roles: {Q: {}}", "instances: {threads: 0}", "engine: x"):
        assert not validator.is_valid(YAML(typ="safe", pure=True).load(text)), text
        with pytest.raises(ValueError, match="deployment:1"):
            parse_config(text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_deployment_files_load_and_are_in_the_readme(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert f"topology: {load_config(file).topology}\n" in text
    assert f"`{file.name}`" in (DEPLOY / "README.md").read_text()
    jsonschema.validate(YAML(typ="safe", pure=True).load(text), deployment_schema())


def test_a_role_overrides_single_settings() -> None:
    config = parse_config(
        "instances: {threads: 4, kv_cache_bytes: 100, kv_transfer: {transport: tcp, group_layers: 2},"
        " batching: {order: slack}}\nslo: {ttft_ms: 900, tpot_ms: 40}\n"
        "roles: {E: {threads: 1}, D: {kv_cache_bytes: 1GiB, kv_transfer: {group_layers: auto},"
        " batching: {order: fcfs}}}"
    )
    encode, prefill, decode = (config.settings_for(role) for role in "EPD")
    assert (encode.threads, encode.kv_cache_bytes) == (1, 100)
    assert (prefill.threads, prefill.kv_transfer.group_layers) == (4, 2)
    assert decode.kv_cache_bytes == 2**30
    assert (decode.kv_transfer.transport, decode.kv_transfer.group_layers) == ("tcp", "auto")
    assert (prefill.batching.order, decode.batching.order) == ("slack", "fcfs")
    vllm = parse_config(
        "engine: vllm\ninstances: {engine_args: {seed: 1, max-logprobs: 9}}\nroles: {P: {engine_args: {seed: 2}}}"
    )
    assert vllm.settings_for("P").engine_args == {"seed": 2, "max_logprobs": 9}
    assert vllm.settings_for("D").engine_args == {"seed": 1, "max_logprobs": 9}


def test_every_setting_reaches_the_instance() -> None:
    """Whatever number the instances are given, they get: each field one more than it is by default."""
    values = {
        name: (field.default or 100) + 1
        for name, field in InstanceSettings.model_fields.items()
        if isinstance(field.default, int | float | None) and not isinstance(field.default, bool)
    }
    values |= {"memory_share": 0.25, "share": 0.5, "tower_share": 0.75}
    values.pop("resident")  # a word
    config = DeploymentConfig.model_validate({"instances": values, "mooncake": {"devices": "mlx5_0"}})
    options = config.options_for(config.placement()[1], device="cpu", port=9001, threads=values["threads"])
    assert len(values) > 10
    assert {name: getattr(options, name) for name in values} == values
    assert (options.name, str(options.role), options.port, options.dtype) == ("p0", "P", 9001, "auto")
    assert options.mooncake.devices == "mlx5_0"


def test_an_instance_started_by_hand_has_its_flags_and_the_options_of_its_role() -> None:
    config = parse_config(
        "{topology: 2E-PD, instances: {host: 10.0.0.1, threads: 2}, roles: {E: {share: 0.5, memory_share: 0.25}}}"
    )
    own = {"port": 9000, "device": "npu:1", "join": ["http://127.0.0.1:8001"], "data_port": 5}
    for host, threads, chosen in ((None, None, ("10.0.0.1", 2)), ("10.0.0.2", 7, ("10.0.0.2", 7))):
        options = config.options_alone("e9", Role.parse("E"), host=host, threads=threads, **own)
        assert (options.host, options.threads) == chosen
        assert (options.name, options.port, options.device, options.data_port) == ("e9", 9000, "npu:1", 5)
        assert options.join == ("http://127.0.0.1:8001",) and options.memory_share == 0.25
        assert options.device_share == DeviceShare(share=0.5, start=0.0)
        assert InstanceOptions.model_validate_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("text", "uses", "starts", "told"),
    [
        ("mooncake: {devices: mlx5_0}", False, False, "here:2"),
        ("instances: {kv_transfer: {transport: mooncake}}", True, False, "here:2"),
        ("feature_store: mooncake", True, True, "here:2"),
        ("{feature_store: mooncake, mooncake: {master: 'store:50051'}}", True, False, "store:50051"),
    ],
)
def test_a_mooncake_master_is_started_where_a_store_names_none(
    text: str, uses: bool, starts: bool, told: str
) -> None:
    config = parse_config(text)
    assert (config.uses_mooncake, config.starts_master) == (uses, starts)
    options = config.options_for(config.placement()[0], device="cpu", port=1, threads=1, master="here:2")
    assert options.mooncake.master == told


def test_only_epd_beside_others_assists() -> None:
    parse_config("topology: 2EPD-2PD\nroles: {EPD: {assist: true}}")
    for text in (
        "topology: E-PD\nroles: {E: {assist: true}}",
        "topology: 2EPD\nroles: {EPD: {assist: true}}",
        "topology: EPD-P\nroles: {EPD: {assist: true}}",
    ):
        with pytest.raises(ValueError, match="assist is for EPD"):
            parse_config(text)
