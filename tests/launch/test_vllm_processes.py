"""The processes of a deployment of vLLM instances."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from epd_serve.config import change_config, load_config, parse_config
from epd_serve.launch.commands import with_trust
from epd_serve.launch.dry_run import dry_run
from epd_serve.launch.vllm import sources as vllm_sources
from epd_serve.launch.vllm.probe import (
    CONNECTORS,
    Module,
    VllmFound,
    check_flags,
    check_found,
    check_vllm_engine,
    connectors_of,
    lacking,
    needed_modules,
    probe_vllm,
)
from epd_serve.launch.vllm.process import VllmProcess, check_engines, link_plugin, vllm_processes

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).parent / "vllm-ascend-qwen3-vl-8b.txt"
#: Flags of vllm serve 0.32 that the files in deploy/ and the command lines use (tests/vllm/test_flags.py).
KNOWN_FLAGS = {
    "host", "port", "served_model_name", "dtype", "tensor_parallel_size", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "ec_transfer_config", "kv_transfer_config", "enable_prefix_caching", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override", "enforce_eager",
    "trust_remote_code", "enable_auto_tool_choice", "tool_call_parser", "enable_prompt_tokens_details",
    "mm_device_do_normalize", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-VL-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def processes(text: str, model: Path) -> dict[str, VllmProcess]:
    config = parse_config(f"engine: vllm\nmodel: {model}\n{text}")
    ports = range(9000, 9000 + 16 * len(config.placement()), 16)
    return {one.placement.name: one for one in vllm_processes(config, config.placement(), list(ports), {})}


def flag(process: VllmProcess, name: str) -> str | None:
    command = list(process.command)
    return command[command.index(f"--{name}") + 1] if f"--{name}" in command else None


def test_each_role_gets_the_connectors_that_it_needs(model: Path) -> None:
    found = processes("topology: E-P-D", model)
    roles = {
        name: tuple(
            json.loads(text)[f"{kind}_role"] if (text := flag(one, f"{kind}-transfer-config")) else None
            for kind in ("ec", "kv")
        )
        for name, one in found.items()
    }
    assert roles == {
        "e0": ("ec_producer", None),
        "p0": ("ec_consumer", "kv_both"),
        "d0": ("ec_consumer", "kv_both"),
    }
    assert "--no-enable-prefix-caching" in found["e0"].command
    kv = json.loads(flag(found["p0"], "kv-transfer-config") or "")
    assert kv["kv_connector_extra_config"] == {"host": "127.0.0.1", "port": 9018}
    alone = processes("topology: EPD", model)["epd0"]
    assert flag(alone, "ec-transfer-config") is flag(alone, "kv-transfer-config") is None
    both = processes("topology: EP-D", model)["ep0"]
    assert flag(both, "ec-transfer-config") is None
    assert flag(both, "kv-transfer-config") is not None


@pytest.mark.parametrize("devices", ["[cpu]", "['cuda:0', 'cuda:1', 'cuda:2']"])
def test_a_d_without_pixels_is_kept_from_encoding(devices: str, model: Path) -> None:
    found = processes(f"topology: E-P-D\ndevices: {devices}\nvllm: {{media: rewritten}}", model)
    for name, role in (("e0", "ec_producer"), ("p0", "ec_consumer"), ("d0", "ec_consumer")):
        told = json.loads(flag(found[name], "ec-transfer-config") or "")
        assert (told["ec_connector"], told["ec_role"]) == ("StoreFeatureConnector", role)


def test_devices_memory_and_threads(model: Path) -> None:
    found = processes("topology: (E-P)-D@tp2\ndevices: ['cuda:0', 'cuda:1', 'cuda:2']", model)
    assert [one.variables["CUDA_VISIBLE_DEVICES"] for one in found.values()] == ["0", "0", "1,2"]
    assert [flag(one, "gpu-memory-utilization") for one in found.values()] == ["0.46", "0.46", None]
    assert [flag(one, "tensor-parallel-size") for one in found.values()] == [None, None, "2"]
    assert found["p0"].variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9018"
    shared = processes(
        "topology: (E-P)-D\ndevices: ['cuda:0', 'cuda:1']\nroles: {E: {share: 0.25}, P: {memory_share: 0.6}}",
        model,
    )
    assert [flag(one, "gpu-memory-utilization") for one in shared.values()] == ["0.23", "0.6", None]
    host = processes("instances: {threads: 3, kv_cache_bytes: 1500MiB}", model)["d0"].variables
    assert (host["OMP_NUM_THREADS"], host["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")


@pytest.mark.parametrize(
    ("kv", "connector", "devices"),
    [
        ("grouped", "GroupedKVConnector", "cpu"),
        ("mooncake", "MooncakeCPUConnector", "cpu"),
        ("nixl", "NixlConnector", "cpu"),
        ("mooncake", "MooncakeConnector", "cuda"),
        ("nixl", "NixlConnector", "cuda"),
        ("mooncake", "MooncakeConnectorV1", "npu"),
    ],
)
@pytest.mark.parametrize(
    ("features", "name"), [("store", "StoreFeatureConnector"), ("file", "ECExampleConnector")]
)
def test_every_connector_has_its_configuration(
    kv: str, connector: str, devices: str, features: str, name: str, model: Path
) -> None:
    text = (
        f"topology: E-P-D\ndevices: [{', '.join(f'{devices}:{n}' for n in range(3))}]" if devices != "cpu" else ""
    )
    found = processes(f"{text}\nvllm: {{features: {features}, feature_dir: /shared, kv: {kv}}}", model)
    feature_configs = [json.loads(flag(found[one], "ec-transfer-config") or "") for one in ("e0", "p0")]
    kv_configs = [json.loads(flag(found[one], "kv-transfer-config") or "") for one in ("p0", "d0")]
    assert {one["ec_connector"] for one in feature_configs} == {name}
    assert {one["kv_connector"] for one in kv_configs} == {connector}
    both = kv == "grouped" and features == "store"
    assert [one["kv_role"] for one in kv_configs] == (["kv_both"] * 2 if both else ["kv_producer", "kv_consumer"])
    assert ("VLLM_MOONCAKE_BOOTSTRAP_PORT" in found["p0"].variables) is (kv == "mooncake" and devices != "npu")
    assert ("VLLM_NIXL_SIDE_CHANNEL_PORT" in found["d0"].variables) is (kv == "nixl")
    assert found["p0"].variables.get("UCX_NET_DEVICES") == ("lo" if kv == "nixl" else None)


@pytest.mark.parametrize(
    ("files", "flags", "raw"),
    [
        ({"preprocessor_config.json": {"min_pixels": 1}}, ["mm_device_do_normalize"], True),
        ({"preprocessor_config.json": {"min_pixels": 1}}, [], False),
        ({"preprocessor_config.json": {"image_mean": [0, 0, 0]}}, ["mm_device_do_normalize"], False),
        ({"processor_config.json": {"image_processor": {"do_rescale": True}}}, ["mm_device_do_normalize"], False),
        ({"preprocessor_config.json": []}, ["mm_device_do_normalize"], False),
    ],
)
def test_pixels_are_normalised_where_the_model_does_not_say_how(
    files: dict[str, object], flags: list[str], raw: bool, model: Path, good: VllmFound
) -> None:
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    config = parse_config(f"engine: vllm\nmodel: {model}\ntopology: PD")
    found = {sys.executable: changed(good, flags=flags)}
    (process,) = vllm_processes(config, config.placement(), [9000], {}, found=found)
    assert ("--no-mm-device-do-normalize" in process.command) is raw


@pytest.mark.parametrize("flags", [[], ["trust_request_mm_kwargs"]])
def test_options_of_videos_are_taken_from_the_gateway_where_vllm_asks_for_trust(
    flags: list[str], model: Path, good: VllmFound
) -> None:
    config = parse_config(f"engine: vllm\nmodel: {model}\ntopology: PD")
    found = {sys.executable: changed(good, flags=flags)}
    (process,) = vllm_processes(config, config.placement(), [9000], {}, found=found)
    assert ("--trust-request-mm-kwargs" in process.command) is bool(flags)


def test_threads_stay_within_the_cores_of_a_share(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    text = "topology: (E-P)-D\ninstances: {threads: 6}\nroles: {E: {share: 0.25}, P: {share: 0.75, threads: 2}}"
    found = {name: one.variables for name, one in processes(text, model).items()}
    assert {name: one["OMP_NUM_THREADS"] for name, one in found.items()} == {"e0": "2", "p0": "2", "d0": "6"}
    assert found["e0"]["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_a_plugin_link_to_another_installation_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "epd_serve").symlink_to(tmp_path / "gone")
    for _ in range(2):
        assert link_plugin(folder) == str(folder)
        assert (folder / "epd_serve").resolve() == ROOT / "epd_serve"
        assert (folder / "device" / "__init__.py").is_file()
    script = (
        "import sys, importlib.metadata as m; sys.path += sys.argv[2:]; print(m.entry_points(group=sys.argv[1]))"
    )
    found = subprocess.run(
        [sys.executable, "-ISc", script, "vllm.general_plugins", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "epd_serve.vllm_plugin:register" in found.stdout, "vLLM finds it in each of its processes"


def test_the_dry_run_of_a_model_that_is_elsewhere_has_all_command_lines(tmp_path: Path) -> None:
    config = parse_config(f"engine: vllm\ntopology: E-P-D\nmodel: {tmp_path / 'elsewhere'}")
    lines = list(dry_run(config, None, {}))
    assert any(line.startswith("# not on this machine: model") for line in lines)
    assert sum(f"serve {tmp_path / 'elsewhere'} " in line for line in lines) == 3


def test_the_dry_run_refuses_a_vllm_that_up_would_refuse(
    model: Path, good: VllmFound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_serve.launch.vllm.process.probe_vllm", lambda python: good)
    config = parse_config(f"engine: vllm\ntopology: E-P-D\nmodel: {model}\ninstances: {{engine_args: {{sed: 1}}}}")
    with pytest.raises(ValueError, match="has no flag sed; did you mean seed"):
        list(dry_run(config, None, {}))
    monkeypatch.setattr("epd_serve.launch.vllm.process.probe_vllm", lambda python: changed(good, vllm=""))
    assert any(line.startswith("# not checked on this machine: ") for line in dry_run(config, None, {}))


def test_each_kind_of_device_has_its_own_vllm(
    model: Path, good: VllmFound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E on an NPU takes no connector of ours, PD on a GPU needs no vllm-ascend: each Python is asked by itself."""
    file = tmp_path / "mixed.yaml"
    file.write_text(
        f"engine: vllm\nmodel: {model}\ntopology: E-PD\ndevices: [npu:0, cuda:0]\ninstances: {{base_port: 8100}}\n"
        "vllm: {python: {E: ascend/bin/python, PD: /opt/cuda/bin/python}, features: file, feature_dir: /shared}\n"
        "roles: {E: {engine_args: {enforce_eager: true}}}"
    )
    ascend, cuda = str(tmp_path / "ascend/bin/python"), "/opt/cuda/bin/python"
    engines = {
        ascend: changed(
            good, vllm="0.23.0", vllm_ascend="0.23.0", epd_serve=False, modules={}, flags=["enforce_eager"]
        ),
        cuda: good,
    }
    monkeypatch.setattr("epd_serve.launch.vllm.process.probe_vllm", lambda python: engines[python])
    config = load_config(file)
    assert check_engines(config) == engines
    found = vllm_processes(config, config.placement(), [8100, 8116], {}, "plugin", found=engines)
    assert [one.command[0] for one in found] == [ascend, cuda]
    assert [one.variables.get("PYTHONPATH") for one in found] == ["plugin", None]
    lines = list(dry_run(config, file, {}))
    assert "# vLLM 0.23.0, vllm-ascend 0.23.0 and vLLM 0.34.0+cpu" in lines
    assert sum(f" {python} " in line for line in lines for python in engines) == 2
    engines[ascend] = changed(engines[ascend], vllm_ascend="")
    with pytest.raises(ValueError, match=f"vllm-ascend is missing in {ascend}"):
        check_engines(config)


def test_settings_and_flags_are_passed_on(model: Path) -> None:
    one = processes(
        "topology: PD\ndtype: bfloat16\nserved_model_name: mine\n"
        "instances: {max_model_len: 99, engine_args: {enforce_eager: true, seed: 3, async_scheduling: false}}\n"
        "vllm: {environment: {VLLM_LOGGING_LEVEL: DEBUG}}",
        model,
    )["pd0"]
    assert (flag(one, "max-model-len"), flag(one, "seed"), flag(one, "dtype")) == ("99", "3", "bfloat16")
    assert flag(one, "served-model-name") == "mine"
    assert {"--enforce-eager", "--no-async-scheduling"} <= set(one.command)
    assert one.variables["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert flag(one, "max-num-seqs") is None, "vLLM's own default"


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", None), ("off", "vllm"), ("/models/mine", "/models/mine")]
)
def test_the_source_of_sampling_defaults_is_passed_on(model: Path, value: str, expected: str | None) -> None:
    assert (
        flag(processes(f"topology: PD\ngeneration_config: {value}", model)["pd0"], "generation-config") == expected
    )


def dry_lines(file: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("epd_serve.launch.dry_run.model_path", lambda _: Path("MODEL"))
    config = load_config(file)
    config = change_config(config, {"model": str(model), "instances": {"base_port": 8100}})
    lines = [line for text in dry_run(config, Path(file.name), {}) for line in text.splitlines()]
    return [line.replace(sys.executable, "PYTHON") for line in lines if not line.startswith("# not ")]


def test_the_dry_run_for_ascend_is_the_reviewed_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dry_lines(ROOT / "deploy" / "vllm-ascend-qwen3-vl-8b.yaml", model, monkeypatch)
    assert "\n".join(lines) + "\n" == SNAPSHOT.read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").glob("vllm-*.yaml")), ids=lambda file: file.stem)
def test_the_command_lines_use_flags_of_vllm_alone(
    file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    for line in dry_lines(file, model, monkeypatch):
        if " serve MODEL " in line:
            used |= {word for word in shlex.split(line.split(" serve MODEL ")[1]) if word.startswith("--")}
    assert used
    assert {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in used} <= KNOWN_FLAGS


def test_two_processes_on_one_npu_share_no_port(model: Path) -> None:
    found = processes(
        "topology: (E-P@tp2)-D\ndevices: [npu:3, npu:4, npu:5]\nvllm: {feature_dir: /dev/shm/f}", model
    )
    ports: set[int] = set()
    for one in found.values():
        variables = one.variables
        first, last = map(int, variables["HCCL_NPU_SOCKET_PORT_RANGE"].split("-"))
        own = {
            *range(first, last + 1),
            int(variables["HCCL_IF_BASE_PORT"]),
            *range(one.options.port, one.options.port + 16),
        }
        assert not ports & own
        ports |= own
        assert variables["VLLM_HOST_IP"] == flag(one, "host")
    assert [one.variables["ASCEND_RT_VISIBLE_DEVICES"] for one in found.values()] == ["3", "3,4", "5"]
    assert ["ASCEND_TRANSFER_TIMEOUT" in one.variables for one in found.values()] == [False, True, True]


@pytest.fixture
def good() -> VllmFound:
    """A vLLM that has all that the connectors need, made of what they ask for."""
    modules: dict[str, Module | None] = {
        name: Module(words=words, names=[], classes={}) for name, words in needed_modules().items()
    }
    for connector in CONNECTORS:
        while lack := lacking(connector, modules):
            grant(lack, modules)
    return VllmFound(
        vllm="0.34.0+cpu",
        vllm_ascend="",
        mooncake=False,
        nixl=False,
        epd_serve=True,
        python="3.11",
        flags=["seed"],
        modules=modules,
    )


def grant(lack: str, modules: dict[str, Module | None]) -> None:
    """Give a vLLM what it is said to lack."""
    words = lack.replace(",", "").split()
    if words[0] in modules:
        there = modules[words[0]]
        assert there is not None
        there.names.append(words[-1])
        if words[-1] in ("ECConnectorBase", "KVConnectorBase_V1"):
            there.classes[words[-1]] = {}
        return
    root, _, method = words[0].partition(".")
    of_root = next(one.classes[root] for one in modules.values() if one is not None and root in one.classes)
    of_root[method or words[-1]] = (words[words.index("not") + 1 :] if method else [], False)


def changed(found: VllmFound, **fields: Any) -> VllmFound:
    return msgspec.structs.replace(found, **fields)


def test_an_unsuitable_vllm_is_refused_with_what_would_do(good: VllmFound) -> None:
    check_found(good, python="python", connectors=CONNECTORS)
    check_flags(good, ["seed"])
    for fields, words in (({"vllm": ""}, "has no vLLM; install it there"), ({"vllm": "0.11.2"}, "0.20 or newer")):
        with pytest.raises(ValueError, match=words):
            check_found(changed(good, **fields), python="python", connectors=CONNECTORS)
    with pytest.raises(ValueError, match="nixl is missing"):
        check_found(good, python="python", needs=["nixl"])
    with pytest.raises(ValueError, match="has no flag sed; did you mean seed"):
        check_flags(good, ["sed"])


@pytest.mark.parametrize(
    ("ascend", "vllm", "fits"),
    [
        ("0.23.0", "0.23.0", ""),
        ("0.23.0rc2", "0.23.0+empty", ""),
        ("0.23.0.post1", "0.23.0", ""),
        ("0.27.2.dev31+g182b75ea", "0.28.0", ""),
        ("0.23.0", "0.33.0", "vLLM 0.23.0"),
        ("0.23.1", "0.23.0", "vLLM 0.23.1"),
        ("0.27.2.dev31+g182b75ea", "0.33.0", "vLLM 0.27.1 or 0.28.0"),
        ("", "0.23.0", "vllm-ascend is missing"),
    ],
)
def test_a_vllm_ascend_for_another_vllm_is_refused(ascend: str, vllm: str, fits: str, good: VllmFound) -> None:
    found = changed(good, vllm=vllm, vllm_ascend=ascend)
    if not fits:
        check_found(found, python="python", needs=["vllm_ascend"])
        return
    with pytest.raises(ValueError, match=fits):
        check_found(found, python="python", needs=["vllm_ascend"])


def test_a_vllm_without_a_hook_is_refused_by_it(good: VllmFound) -> None:
    """0.27 lacks the connectors' metrics, 0.23 the requests' notes on features."""
    metrics = "vllm.distributed.ec_transfer.ec_connector.metrics"
    older = changed(good, vllm="0.27.1", modules={**good.modules, metrics: None})
    with pytest.raises(ValueError, match=r"features: store does not fit vLLM 0.27.1 .*it has no .*metrics.*0.33"):
        check_found(older, python="python", connectors=["store"])
    request = good.modules["vllm.v1.request"]
    assert request is not None
    silent = {**good.modules, "vllm.v1.request": msgspec.structs.replace(request, words=[])}
    with pytest.raises(ValueError, match="knows no ec_transfer_params"):
        check_found(changed(good, modules=silent), python="python", connectors=["store"])


@pytest.mark.parametrize(
    ("method", "told", "words"),
    [
        ("save_kv_layer", None, "has no save_kv_layer"),
        ("save_kv_layer", (["layer_name"], False), "takes layer_name, and not layer_name, kv_layer"),
        ("wait_for_all", ([], True), "asks for wait_for_all"),
    ],
)
def test_a_hook_that_changes_is_seen(
    method: str, told: tuple[list[str], bool] | None, words: str, good: VllmFound
) -> None:
    hooks = next(
        one.classes["KVConnectorBase_V1"]
        for one in good.modules.values()
        if one is not None and "KVConnectorBase_V1" in one.classes
    )
    hooks.pop(method, None)
    if told is not None:
        hooks[method] = told
    assert words in good.lacks("grouped")
    assert not good.lacks("store")


def test_flags_are_found_wherever_vllm_keeps_them(tmp_path: Path) -> None:
    """Those of the frontend have moved with each version."""
    home = tmp_path / "vllm"
    for place, field in (("engine/arg_utils.py", "seed"), ("entrypoints/common/cli_args.py", "tool_call_parser")):
        file = home / place
        file.parent.mkdir(parents=True)
        file.write_text(f"class SomeArgs:\n    {field}: str\n")
    (home / "__init__.py").touch()
    script = f"import sys, runpy; sys.path.append({str(tmp_path)!r}); sys.argv[1:] = ['{{}}']; "
    script += f"runpy.run_path({vllm_sources.__file__!r}, run_name='__main__')"
    told = subprocess.run([sys.executable, "-ISc", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(told)["flags"] == ["seed", "tool_call_parser"]


def test_the_check_says_what_can_run(tmp_path: Path, good: VllmFound) -> None:
    older = changed(good, mooncake=True, modules={})
    assert {name for name, missing in connectors_of(older).items() if not missing} == {
        "features: file",
        "kv: mooncake",
    }
    assert not connectors_of(good)["features: store"]
    shown = Console(file=io.StringIO(), width=1000)
    assert not check_vllm_engine(shown, tmp_path / "nothing")
    assert "cannot be asked for its vLLM" in shown.file.getvalue()


def test_the_probe_asks_the_interpreter_that_is_named(tmp_path: Path) -> None:
    found = probe_vllm(sys.executable)
    assert found.python == sys.version.split()[0]
    with pytest.raises(ValueError, match="cannot be asked for its vLLM"):
        probe_vllm(tmp_path / "nothing")


def test_with_tls_each_server_shows_a_certificate_and_asks_for_one(model: Path) -> None:
    tls = "tls: {ca: /tls/ca.pem, cert: /tls/cert.pem, key: /tls/key.pem}\n"
    text = f"topology: E-PD\ncluster_key: only-this-cluster-knows\n{tls}"
    found = processes(text, model)
    assert {*found} == {"e0", "pd0"}
    for process in found.values():
        assert flag(process, "ssl-ca-certs") == "/tls/ca.pem" and flag(process, "ssl-keyfile") == "/tls/key.pem"
        assert flag(process, "ssl-certfile") == "/tls/cert.pem" and flag(process, "ssl-cert-reqs") == "2"
    config = parse_config(f"engine: vllm\nmodel: {model}\n{text}")
    assert config.read_cluster_key() == "only-this-cluster-knows"
    [url, *_] = [one.spec(config, with_trust(config, {})).url for one in found.values()]
    assert url == "https://127.0.0.1:9000"
