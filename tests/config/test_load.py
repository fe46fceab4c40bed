from pathlib import Path

import pytest

from epd_serve.config import ConfigError, change_config, load_config, parse_config
from epd_serve.demo import weights_dir

HASH = "sha256:" + "0" * 64
NPUS = "devices: ['npu:0', 'npu:1', 'npu:2']"


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("model: demo\ntopolgy: E-P-D", 2, "topolgy"),
        ("gateway:\n  host: 127.0.0.1\n  prot: 1", 3, "gateway.prot"),
        ("model: demo\n\ntopology: (E-P-D", 3, "topology"),
        ("topology: E@tp2-P-D", 1, "topology"),
        ("topology: E-PD\ndevices:\n  - cuda:0\n  - gpu", 4, "devices.1"),
        ("instances:\n  num_blocks: 3", 2, "instances.num_blocks: unknown key"),
        ("instances:\n  kv_transfer:\n    group_layers: 0", 3, "instances.kv_transfer.group_layers"),
        ("instances: {batching: {order: slack}}", 1, "batching.order: slack"),
        ("roles: {P: {kv_transfer: {transport: mooncake}}}", 1, "kv_transfer.transport is mooncake for P alone"),
        ("roles:\n  E: {}\n  Q: {}", 3, "roles.Q"),
        ("topology: E-PD@tp2\nengine: native", 1, "topology: @tp2 needs engine: vllm"),
        ("model: {shape_of: qwen2.5-vl-7b}", 1, "model: shape_of lacks weights"),
        ("vllm: {}", 1, "vllm and engine_args are for engine: vllm"),
        ("engine: vllm\ninstances:\n  engine_args: {port: 1}", 3, "instances.engine_args"),
        ("engine: vllm\ntopology: ED-P", 1, "ED"),
        ("engine: vllm\nfeature_store: mooncake", 1, "feature_store has no effect"),
        (f"engine: vllm\ntopology: P-D@tp2\n{NPUS}", 1, "@tp2 of D"),
        (f"engine: vllm\nvllm: {{kv: nixl}}\ntopology: P-D\n{NPUS}", 1, "vllm.kv: nixl"),
        ("engine: vllm\ntopology: P-D\ndevices: ['npu:0', 'cuda:0']", 1, "devices: KV"),
        ("engine: vllm\ncluster_key: sixteen-letters-or-more", 1, "cluster_key"),
        ("cluster_key: 7", 1, "cluster_key"),
        ("cluster_key: {env: A, file: b}", 1, "cluster_key"),
        ("gateway: {api_keys: [{name: a, hash: 'x31337'}]}", 1, "gateway.api_keys.0.hash"),
        (f"gateway: {{api_keys: [{{name: a, hash: '{HASH}'}}, {{name: b, hash: '{HASH}'}}]}}", 1, "gateway"),
        ("gateway: {admin: {host: 0.0.0.0, port: 1}}", 1, "gateway.admin"),
        ("gateway: {media: {allowed_domains: ['http://x']}}", 1, "gateway.media.allowed_domains.0"),
        ("- topology", 1, "expected keys and values"),
    ],
)
def test_errors_name_file_line_and_key_and_show_no_value(tmp_path: Path, text: str, line: int, key: str) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{line}: {key}")
    assert "31337" not in str(caught.value), "it may be a secret"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("roles: {X: {}}", "roles.X: write 'E', 'P', 'D', 'EP', 'ED', 'PD' or 'EPD'"),
        ("instances: 7", "instances: write keys and values"),
        ("gateway:", "gateway: write keys and values"),
        ("cluster_key: 31337", "cluster_key: write text or keys and values"),
        (
            "instances: {kv_cache_bytes: lots}",
            "instances.kv_cache_bytes: write a number of bytes or text such as 8GiB",
        ),
        (
            "instances: {kv_transfer: {group_layers: 0}}",
            "instances.kv_transfer.group_layers: write 'auto' or at least 1",
        ),
        ("vllm: {python: {E: 7}}", "vllm.python.E: write a path"),
        ("model: {shape_of: 7}", "model.shape_of: write text"),
        ("slo: {ttft_ms: .nan}", "slo.ttft_ms: write a finite number"),
        ("kv_cache_bytes: 1GiB", "kv_cache_bytes: unknown key; use instances.kv_cache_bytes"),
        ("hots: a", "hots: unknown key; did you mean gateway.host?"),
        ("7: a", "7: write keys that are text"),
        ("gateway: {api_keys: [{name: a}]}", "gateway.api_keys.0.hash: required"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_what_to_write(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="f.yaml")
    assert str(caught.value) == f"f.yaml:1: {fault}"


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for file in (
        tmp_path / "none.yaml",
        Path("Qwen/Qwen2.5-VL-3B-Instruct"),
        weights_dir(),
        tmp_path / "binary.yaml",
    ):
        with pytest.raises(ConfigError, match=str(file)):
            load_config(file)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("model: ./models/tiny\ntrace: runs/1\ngateway: {access_log: log}")
    config = load_config(file)
    assert config.trace == tmp_path / "runs/1"
    assert config.model == str(tmp_path / "models/tiny")
    assert config.model_name == "tiny"
    assert config.gateway.access_log == str(tmp_path / "log")


def test_changes_are_checked_together_with_the_rest() -> None:
    config = parse_config("topology: EPD\ndevices: [cuda:0]\ngateway: {host: 0.0.0.0}")
    changed = change_config(config, {"gateway": {"port": 0}})
    assert (changed.gateway.host, changed.gateway.port) == ("0.0.0.0", 0)
    with pytest.raises(ConfigError, match="command line: devices: topology E-PD needs 2 devices"):
        change_config(config, {"topology": "E-PD"})


def test_what_is_written_reads_back_the_same() -> None:
    config = parse_config("topology: DE-P\nroles: {ED: {threads: 3}}\ninstances: {feature_cache_bytes: 1GiB}")
    again = parse_config(config.model_dump_json(exclude_unset=True))
    assert again == config and again.settings_for("ED").feature_cache_bytes == 2**30
