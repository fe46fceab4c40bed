from pathlib import Path

import pytest

from epd_serve.config import ConfigError, DeploymentConfig, change_config, load_config, model_path, parse_config
from epd_serve.demo import weights_dir


def test_an_empty_file_is_the_default_deployment() -> None:
    config = parse_config("# nothing\n")
    assert config == DeploymentConfig()
    assert (str(config.topology), config.model_name, config.devices) == ("E-P-D", "demo", ("cpu",))


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("model: demo\ntopolgy: E-P-D", 2, "topolgy"),
        ("gateway:\n  host: 127.0.0.1\n  prot: 1", 3, "gateway.prot"),
        ("gateway: {max_redirects: 3}", 1, "gateway.max_redirects"),
        ("model: demo\n\ntopology: (E-P-D", 3, "topology"),
        ("topology: E@tp2-P-D", 1, "topology"),
        ("topology: 3", 1, "topology"),
        ("topology: EP-D\ndevices:\n  - cuda:0", 2, "devices"),
        ("topology: E-PD\ndevices:\n  - cuda:0\n  - gpu", 4, "devices.1"),
        ("devices: [cpu x 4]", 1, "devices.0"),
        ("devices: [npu]", 1, "devices.0"),
        ("devices: cpu", 1, "devices"),
        ("engine: llama", 1, "engine"),
        ("engine: vllm\ninstances:\n  engine_args: {port: 1}", 3, "instances.engine_args"),
        ("instances:\n  block_size: 0", 2, "instances.block_size"),
        ("instances:\n  num_blocks: 3\n  kv_cache_bytes: 2GiB", 1, "instances"),
        ("instances:\n  kv_transfer:\n    group_layers: 0", 3, "instances.kv_transfer.group_layers"),
        ("instances: {kv_cache_bytes: 3 apples}", 1, "instances.kv_cache_bytes"),
        ("roles:\n  E: {}\n  Q: {}", 3, "roles.Q"),
        ("roles:\n  E: {base_port: 1}", 2, "roles.E.base_port"),
        ("gateway:", 1, "gateway"),
        ("model: demo\ngateway:\n  <<: {prot: 1}", 2, "gateway.prot"),
        ("topology: E-PD@tp2\nengine: native", 1, "topology: @tp2 needs engine: vllm"),
        ("dtype: auto\nvllm: {}", 1, "vllm and engine_args are for engine: vllm"),
        ("- topology", 1, "expected keys and values such as 'topology: E-P-D'"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, line: int, key: str) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{line}: {key}")


@pytest.mark.parametrize(
    "text", ["model: 2020-99-99", "model: !!int x", "[" * 5000, "model: demo\nmodel: other", "topology: ["]
)
def test_what_the_yaml_library_stumbles_over_names_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_every_fault_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("gateway:\n  port: http\ndtype: fp32\ntopolgy: E", source="x.yaml")
    assert {line.split(" ")[0] for line in str(caught.value).splitlines()} == {
        "x.yaml:2:",
        "x.yaml:3:",
        "x.yaml:4:",
    }


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"No such file .*a model is named by --model Qwen/Qwen2\.5-VL"):
        load_config(Path("Qwen/Qwen2.5-VL-3B-Instruct"))
    with pytest.raises(ConfigError, match=r"Is a directory; .*a model is named by --model"):
        load_config(weights_dir())
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(tmp_path / "binary.yaml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("model: ./models/tiny\ntrace: runs/1\ngateway: {media: {allowed_file_dirs: [pictures, /srv]}}")
    config = load_config(file)
    assert config.trace == tmp_path / "runs/1"
    assert config.model == str(tmp_path / "models/tiny")
    assert config.model_name == "tiny"
    assert config.gateway.media.allowed_file_dirs == (tmp_path / "pictures", Path("/srv"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1048576", 1048576), ("512MiB", 512 * 2**20), ("2Gi", 2**31), ("1.5 kb", 1500), ("3G", 3 * 10**9)],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_config(f"instances: {{kv_cache_bytes: {text}}}").instances.kv_cache_bytes == expected


def test_changes_are_checked_together_with_the_rest() -> None:
    config = parse_config("topology: EPD\ndevices: [cuda:0]\ngateway: {host: 0.0.0.0}")
    changed = change_config(config, {"gateway": {"port": 0}})
    assert (changed.gateway.host, changed.gateway.port) == ("0.0.0.0", 0)
    with pytest.raises(ConfigError, match="command line: devices: topology E-PD needs 2 devices"):
        change_config(config, {"topology": "E-PD"})


def test_what_is_written_reads_back_the_same() -> None:
    config = parse_config("topology: DE-P\nroles: {ED: {threads: 3}}\ninstances: {feature_cache_bytes: 1GiB}")
    assert parse_config(config.model_dump_json(exclude_unset=True)) == config
    assert parse_config(config.model_dump_json(exclude_unset=True)).settings_for("ED").feature_cache_bytes == 2**30


def test_a_model_must_be_a_transformers_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no directory .*hf download"):
        model_path("Qwen/Qwen2.5-VL-3B-Instruct")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        model_path(str(tmp_path))
    for name, words in (("a.gguf", "GGUF files are llama"), ("adapter_config.json", "it is an adapter: merge it")):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=words):
            model_path(str(tmp_path))
        if name == "a.gguf":
            with pytest.raises(ValueError, match=r"is a file; GGUF files are llama"):
                model_path(str(tmp_path / name))
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text("{}")
    assert model_path(str(tmp_path)) == tmp_path
