"""The processes of a deployment of vLLM instances."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_serve.config import change_config, load_config, parse_config
from epd_serve.launch.dry_run import dry_run
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import VllmFound, check_found, find_vllm
from epd_serve.launch.vllm.process import check_engines, link_plugin, vllm_processes

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).parent / "vllm-ascend-qwen3-vl-8b.txt"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-VL-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def processes(text: str, model: Path) -> dict[str, ProcessSpec]:
    config = parse_config(f"engine: vllm\nmodel: {model}\n{text}")
    ports = range(9000, 9000 + 16 * len(config.placement()), 16)
    return {one.name: one.spec for one in vllm_processes(config, config.placement(), list(ports), {})}


def flag(process: ProcessSpec, name: str) -> str | None:
    command = list(process.command)
    return command[command.index(f"--{name}") + 1] if f"--{name}" in command else None


def test_each_role_gets_the_connectors_that_it_needs(model: Path) -> None:
    def roles(topology: str) -> dict[str, list[str | None]]:
        texts = {
            name: [flag(one, f"{kind}-transfer-config") for kind in ("ec", "kv")]
            for name, one in processes(f"topology: {topology}", model).items()
        }
        return {
            name: [
                text and json.loads(text)[f"{kind}_role"] for kind, text in zip(("ec", "kv"), both, strict=True)
            ]
            for name, both in texts.items()
        }

    assert roles("E-P-D") == {
        "e0": ["ec_producer", None],
        "p0": ["ec_consumer", "kv_both"],
        "d0": ["ec_consumer", "kv_both"],
    }
    assert roles("EPD") == {"epd0": [None, None]}
    assert roles("EP-D") == {"ep0": [None, "kv_both"], "d0": [None, "kv_both"]}
    found = processes("topology: E-P-D", model)
    assert "--no-enable-prefix-caching" in found["e0"].command
    bootstrap = [one.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for one in found.values()]
    assert bootstrap == [
        None,
        "9018",
        "9034",
    ]
    assert [found[name].environment.get("VLLM_HOST_IP") for name in found] == [None, "127.0.0.1", "127.0.0.1"]


def test_devices_memory_and_threads(model: Path) -> None:
    found = processes("topology: (E-P)-D@tp2\ndevices: ['cuda:0', 'cuda:1', 'cuda:2']", model)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in found.values()] == ["0", "0", "1,2"]
    assert [flag(one, "gpu-memory-utilization") for one in found.values()] == ["0.46", "0.46", None]
    assert [flag(one, "tensor-parallel-size") for one in found.values()] == [None, None, "2"]
    assert found["p0"].environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9018"
    shared = processes(
        "topology: (E-P)-D\ndevices: ['cuda:0', 'cuda:1']\nroles: {E: {share: 0.25}, P: {memory_share: 0.6}}",
        model,
    )
    assert [flag(one, "gpu-memory-utilization") for one in shared.values()] == ["0.23", "0.6", None]
    own = processes("chat_template: /own.jinja\ninstances: {threads: 3, kv_cache_bytes: 1500MiB}", model)["d0"]
    assert flag(own, "chat-template") == "/own.jinja"
    host = own.environment
    assert (host["OMP_NUM_THREADS"], host["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")


@pytest.mark.parametrize(
    ("kv", "connector", "devices"),
    [
        ("mooncake", "MooncakeCPUConnector", "cpu"),
        ("nixl", "NixlConnector", "cpu"),
        ("mooncake", "MooncakeConnector", "cuda"),
        ("nixl", "NixlConnector", "cuda"),
        ("mooncake", "MooncakeConnectorV1", "npu"),
    ],
)
def test_every_connector_has_its_configuration(kv: str, connector: str, devices: str, model: Path) -> None:
    text = (
        f"topology: E-P-D\ndevices: [{', '.join(f'{devices}:{n}' for n in range(3))}]" if devices != "cpu" else ""
    )
    found = processes(f"{text}\nvllm: {{kv: {kv}}}", model)
    feature_configs = [json.loads(flag(found[one], "ec-transfer-config") or "") for one in ("e0", "p0")]
    shares_directory = ["shared_storage_path" in one["ec_connector_extra_config"] for one in feature_configs]
    assert shares_directory == [devices == "npu"] * 2
    kv_configs = [json.loads(flag(found[one], "kv-transfer-config") or "") for one in ("p0", "d0")]
    name = "ECExampleConnector" if devices == "npu" else "StoreFeatureConnector"
    assert {one["ec_connector"] for one in feature_configs} == {name}
    assert {one["kv_connector"] for one in kv_configs} == {connector}
    assert {one["kv_load_failure_policy"] for one in kv_configs} == {"recompute"}
    both = kv == "mooncake" and devices != "npu"
    assert [one["kv_role"] for one in kv_configs] == (["kv_both"] * 2 if both else ["kv_producer", "kv_consumer"])
    for variables in (found["p0"].environment, found["d0"].environment):
        assert ("VLLM_MOONCAKE_BOOTSTRAP_PORT" in variables) is both
        assert ("VLLM_NIXL_SIDE_CHANNEL_PORT" in variables) is (kv == "nixl")
        assert ("VLLM_SSM_CONV_STATE_LAYOUT" in variables) is (kv == "nixl"), "or Qwen3.5 does not start"
    assert found["p0"].environment.get("UCX_NET_DEVICES") == ("lo" if kv == "nixl" else None)


def test_a_plugin_link_to_another_installation_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "epd_serve").symlink_to(tmp_path / "gone")
    for _ in range(2):
        assert link_plugin(folder) == str(folder)
        assert (folder / "epd_serve").resolve() == ROOT / "epd_serve"
        assert (folder / "device" / "__init__.py").is_file()
    script = "import sys, importlib.metadata as m; sys.path += sys.argv[1:]; print(m.entry_points())"
    command = [sys.executable, "-ISc", script, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "epd_serve.vllm_plugin:register" in found.stdout, "vLLM finds it in each of its processes"


def test_a_dry_run_may_be_for_another_machine_and_refuses_a_vllm_that_does_not_fit(
    tmp_path: Path, good: VllmFound, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(f"engine: vllm\ntopology: E-P-D\nmodel: {tmp_path / 'elsewhere'}")
    monkeypatch.setattr("epd_serve.launch.vllm.process.find_vllm", lambda python: changed(good, vllm=""))
    lines = "\n".join(dry_run(config, None, {}))
    assert "# not on this machine: model" in lines and "# not checked on this machine: " in lines
    assert lines.count(f"serve {tmp_path / 'elsewhere'} ") == 3
    monkeypatch.setattr("epd_serve.launch.vllm.process.find_vllm", lambda python: changed(good, vllm="0.19.0"))
    with pytest.raises(ValueError, match="is too old"):
        list(dry_run(config, None, {}))


def test_each_kind_of_device_has_its_own_vllm(
    model: Path, good: VllmFound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E on an NPU takes no connector of ours, PD on a GPU needs no vllm-ascend: each Python is asked by itself."""
    file = tmp_path / "mixed.yaml"
    file.write_text(
        f"engine: vllm\nmodel: {model}\ntopology: E-PD\ndevices: [npu:0, cuda:0]\ninstances: {{base_port: 8100}}\n"
        "vllm: {python: {E: ascend/bin/python, PD: /opt/cuda/bin/python}}\n"
        "roles: {E: {engine_args: {enforce_eager: true}}}"
    )
    ascend, cuda = str(tmp_path / "ascend/bin/python"), "/opt/cuda/bin/python"
    engines = {ascend: changed(good, vllm="0.23.0", vllm_ascend="0.23.0", epd_serve=False), cuda: good}
    monkeypatch.setattr("epd_serve.launch.vllm.process.find_vllm", lambda python: engines[python])
    config = load_config(file)
    assert check_engines(config) == engines
    found = vllm_processes(config, config.placement(), [8100, 8116], {}, "plugin", found=engines)
    assert [one.spec.command[0] for one in found] == [ascend, cuda]
    assert [one.spec.environment.get("PYTHONPATH") for one in found] == ["plugin", None]
    lines = list(dry_run(config, file, {}))
    assert "# vLLM 0.23.0, vllm-ascend 0.23.0 and vLLM 0.34.0+cpu" in lines
    assert sum(f" {python} " in line for line in lines for python in engines) == 2
    engines[ascend] = changed(engines[ascend], vllm_ascend="")
    with pytest.raises(ValueError, match=f"vllm-ascend is missing in {ascend}"):
        check_engines(config)


def dry_lines(file: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("epd_serve.launch.dry_run.model_path", lambda _: Path("MODEL"))
    config = load_config(file)
    config = change_config(config, {"model": str(model), "instances": {"base_port": 8100}})
    lines = [line for text in dry_run(config, Path(file.name), {}) for line in text.splitlines()]
    return [line.replace(sys.executable, "PYTHON") for line in lines if not line.startswith("# not ")]


def test_the_dry_run_for_ascend_is_the_reviewed_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dry_lines(ROOT / "deploy" / "vllm-ascend-qwen3-vl-8b.yaml", model, monkeypatch)
    assert "\n".join(lines) + "\n" == SNAPSHOT.read_text()


def test_two_processes_on_one_npu_share_no_port(model: Path) -> None:
    found = processes("topology: (E-P@tp2)-D\ndevices: [npu:3, npu:4, npu:5]", model)
    ports: set[int] = set()
    for port, one in zip(range(9000, 9048, 16), found.values(), strict=True):
        first, last = map(int, one.environment["HCCL_NPU_SOCKET_PORT_RANGE"].split("-"))
        own = {*range(first, last + 1), *range(port, port + 16)}
        own.add(int(one.environment["HCCL_IF_BASE_PORT"]))
        assert not ports & own
        ports |= own
        assert one.environment["VLLM_HOST_IP"] == flag(one, "host")
    assert [one.environment["ASCEND_RT_VISIBLE_DEVICES"] for one in found.values()] == ["3", "3,4", "5"]
    assert ["ASCEND_TRANSFER_TIMEOUT" in one.environment for one in found.values()] == [False, True, True]


@pytest.fixture
def good() -> VllmFound:
    """A vLLM for CPUs without Mooncake and NIXL."""
    return VllmFound(
        vllm="0.34.0+cpu", vllm_ascend="", mooncake=False, nixl=False, epd_serve=True, python="3.11",
        architectures=["Known"],
    )  # fmt: skip


def changed(found: VllmFound, **fields: Any) -> VllmFound:
    return msgspec.structs.replace(found, **fields)


@pytest.mark.parametrize(
    ("fields", "needs", "words"),
    [
        ({"vllm": ""}, [], "/x/python lacks vLLM; install it there"),
        ({"vllm": "0.19.0"}, [], r"vLLM 0\.19\.0 of /x/python is too old; install 0\.20 or newer"),
        ({"vllm": "0.27.1"}, ["store"], r"vLLM 0\.27\.1 of /x/python cannot send .* install 0\.32 or newer"),
        ({}, ["nixl"], "nixl is missing in /x/python"),
        ({}, ["mooncake"], "mooncake is missing in /x/python"),
        ({"vllm_ascend": "0.23.0", "vllm": "0.33.0"}, ["vllm_ascend"], "vLLM 0.23.0"),
        ({"vllm_ascend": "0.23.1", "vllm": "0.23.0"}, ["vllm_ascend"], "vLLM 0.23.1"),
        ({"vllm": "0.23.0"}, ["vllm_ascend"], "vllm-ascend is missing"),
    ],
)
def test_an_unsuitable_vllm_is_refused_with_what_would_do(
    fields: dict[str, Any], needs: list[str], words: str, good: VllmFound
) -> None:
    check_found(good, python="/x/python", needs=["store"])
    with pytest.raises(ValueError, match=words):
        check_found(changed(good, **fields), python="/x/python", needs=needs)


@pytest.mark.parametrize(
    ("ascend", "vllm"),
    [
        ("0.23.0", "0.23.0"),
        ("0.23.0rc2", "0.23.0+empty"),
        ("0.23.0.post1", "0.23.0"),
        ("0.27.2.dev31+g182b75ea", "0.28.0"),
    ],
)
def test_a_vllm_ascend_fits_its_vllm(ascend: str, vllm: str, good: VllmFound) -> None:
    check_found(changed(good, vllm=vllm, vllm_ascend=ascend), python="python", needs=["vllm_ascend"])


def test_the_interpreter_that_is_named_is_asked(tmp_path: Path) -> None:
    found = find_vllm(sys.executable)
    assert found.python == sys.version.split()[0]
    with pytest.raises(ValueError, match="does not run"):
        find_vllm(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="/bin/true is not a Python"):
        find_vllm("/bin/true")


def test_mooncake_may_need_the_libraries_that_torch_loads(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    needs = "import sys\nif 'torch' not in sys.modules:\n    raise ImportError('libcudart.so.12')"
    (tmp_path / "mooncake" / "engine.py").write_text(needs)
    (tmp_path / "torch.py").touch()
    (tmp_path / "nixl_cu13.py").touch()  # its loader, which vLLM imports, is missing
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = find_vllm(str(python))
    assert (found.mooncake, found.nixl) == (True, importlib.util.find_spec("nixl") is not None)


def test_with_tls_each_server_shows_a_certificate_and_asks_for_one(model: Path) -> None:
    tls = "tls: {ca: /tls/ca.pem, cert: /tls/cert.pem, key: /tls/key.pem}\n"
    text = f"topology: E-PD\ncluster_key: only-this-cluster-knows\n{tls}"
    found = processes(text, model)
    assert {*found} == {"e0", "pd0"}
    for process in found.values():
        flags = [flag(process, f"ssl-{name}") for name in ("ca-certs", "certfile", "keyfile", "cert-reqs")]
        assert flags == ["/tls/ca.pem", "/tls/cert.pem", "/tls/key.pem", "2"]
    assert found["e0"].url == "https://127.0.0.1:9000"
