"""A deployment on a Ray cluster: what its actors run and take, and how it lives through the loss of its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from chat import chat
from own_ports import free_port
from pictures import noise
from program import wait_until

from epd_serve.config import parse_config
from epd_serve.config.keys import ADMIN_KEY
from epd_serve.launch.remote import ray as on_ray
from epd_serve.launch.remote.unit import Unit, unit_placement
from epd_serve.launch.vllm.process import vllm_processes

ROOT = Path(__file__).parents[2]
#: Or as long as the start of the whole takes where the machine is busy.
MAX_AWAY_S = 30.0
TUNED = {"initial_delay_ms": "0", "period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}


def test_groups_take_what_they_share_once() -> None:
    config = parse_config("{topology: 2(E-P)-D@tp2, engine: vllm, model: m, devices: ['cuda x 4']}")
    found = [(one.name, one.resource, one.amount) for one in on_ray.groups(config)]
    assert found == [("e0-p0", "GPU", 1), ("e1-p1", "GPU", 1), ("d0", "GPU", 2)]
    emulated = parse_config(
        "{topology: E-D-P, model: {shape_of: qwen2-vl-7b}, devices: ['emulated:h200:0', 'emulated:a100 x 2']}"
    )
    assert [one.resource for one in on_ray.groups(emulated)] == ["GPU", "GPU", "GPU"]
    cpus = parse_config("{topology: EP-D, roles: {D: {threads: 4}}}")
    assert [(one.resource, one.amount) for one in on_ray.groups(cpus)] == [("CPU", 1), ("CPU", 4)]


def test_instances_see_the_devices_that_ray_shows(tmp_path: Path) -> None:
    """Also where an @tp takes several, and where other instances are elsewhere; vLLM as our engine."""
    config = parse_config("{topology: P@tp2-D, engine: vllm, devices: ['npu x 3'], model: /models/m}")
    shown = {"ASCEND_RT_VISIBLE_DEVICES": "4,6", "OMP_NUM_THREADS": "2"}
    (p0,) = vllm_processes(config, unit_placement(config, 0, None), [8100], shown, model="/models/m")
    command = p0.spec.command
    assert p0.spec.environment["ASCEND_RT_VISIBLE_DEVICES"] == "4,6"
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert not any("executor" in word for word in command), "vLLM's own choice within a host"
    config = parse_config("{topology: E-PD, engine: native, devices: ['cuda x 2'], model: demo}")
    here, shown = unit_placement(config, 1, None), {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    [one] = Unit(config, here, "10.0.0.2", shown, tmp_path).processes
    assert one.spec.environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"


def test_the_file_in_the_cluster_has_no_secret() -> None:
    config = parse_config(
        "{cluster_key: a-cluster-key-of-tests, gateway: {"
        "admin: {port: 9001, key: hidden-key}, instances: {e0: 'http://10.0.0.9:1'}}}"
    )
    text = on_ray.cluster_file(config, "10.0.0.1", 9001)
    assert "hidden" not in text and "of-tests" not in text
    gateway = parse_config(text).gateway
    assert (gateway.admin.host, gateway.admin.port, gateway.instances) == ("10.0.0.1", 9001, {})


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("{engine: auto, devices: ['npu x 3']}", "engine: auto inspects the local machine"),
        ("{feature_store: mooncake}", "set mooncake.master"),
        ("{gateway: {port: 0}}", "gateway.port: 0"),
        ("{slo: {ttft_ms: 9, tpot_ms: 9}, elastic: {}}", "elastic"),
    ],
)
def test_what_ray_cannot_do(file: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        on_ray.groups(parse_config(file))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head and two nodes of two NPUs: 4 and 6 of the one, 1 and 3 of the other."""
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install '.[ray]'")
    for name, value in TUNED.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for devices in ("4,6", "1,3"):
            monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", devices)
            made.add_node(num_cpus=1, resources={"NPU": 2})
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
        yield made
    finally:
        made.shutdown()


def _instances(base_port: int) -> dict[str, psutil.Process]:
    """The processes of the deployment's instances, by their names."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            options = json.loads(command[command.index("--options") + 1])
        except (psutil.Error, ValueError):
            continue
        if base_port <= options.get("port", 0) < base_port + 3:
            found[options["name"]] = process
    return found


def _all_instances(base_port: int) -> dict[str, psutil.Process]:
    """When they are there: P encodes where no E is."""
    wait_until(lambda: len(_instances(base_port)) == 3, "all instances run", 200)
    return _instances(base_port)


def _shown_devices(base_port: int) -> dict[str, str]:
    return {name: one.environ()["ASCEND_RT_VISIBLE_DEVICES"] for name, one in _all_instances(base_port).items()}


def _ask(port: int, seed: int) -> tuple[int, str]:
    body = chat("What is it?", noise(seed, (96, 72)), max_tokens=8, model="qwen2.5-vl-7b")
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    if answer.status_code == 200:
        return 200, answer.json()["choices"][0]["message"]["content"]
    return answer.status_code, answer.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_pair_and_a_decoder_live_through_a_kill_and_a_lost_node(cluster: Any, tmp_path: Path) -> None:
    port, admin_port, base_port = (free_port("127.0.0.1") for _ in range(3))
    file = tmp_path / "pair.yaml"
    file.write_text(
        "topology: (E-P)-D\ndevices: ['emulated:ascend-910b3 x 2']\nmodel: {shape_of: qwen2.5-vl-7b}\n"
        f"gateway: {{port: {port}, admin: {{port: {admin_port}}}}}\ninstances: {{base_port: {base_port}}}\n"
    )
    environment = {**os.environ, ADMIN_KEY: "admin-key-of-the-tests"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "epd_serve.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    where = f"--on=ray={cluster.address}"
    started = time.monotonic()
    up = run("up", str(file), where)
    assert up.returncode == 0, up.stdout + up.stderr
    up_s = time.monotonic() - started
    assert f"Ready: (E-P)-D as placement group pair. OpenAI API: http://127.0.0.1:{port}/v1" in up.stdout
    again = run("up", str(file), where)
    assert again.returncode == 2 and "pair runs on this cluster" in again.stderr

    devices = _shown_devices(base_port)
    assert devices["e0"] == devices["p0"] != devices["d0"], "the pair shares one"
    assert {devices["e0"], devices["d0"]} in ({"4", "6"}, {"1", "3"})
    good = [_ask(port, seed) for seed in range(3)]
    assert [status for status, _ in good] == [200] * 3

    killed = _instances(base_port)
    for name in ("d0", "e0"):
        killed[name].send_signal(signal.SIGKILL)
        assert [_ask(port, seed) for seed in range(3)] == good
    back = _all_instances(base_port)
    assert back["p0"].pid == killed["p0"].pid
    assert back["d0"].pid != killed["d0"].pid and back["e0"].pid != killed["e0"].pid

    here = {devices["e0"], devices["d0"]}
    (node,) = [one for one in cluster.worker_nodes if {*_devices_of(one)} == here]
    (spare,) = [one for one in cluster.worker_nodes if one is not node]
    removed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    while [_ask(port, seed) for seed in range(3)] != good:
        assert time.monotonic() - removed < 400
        time.sleep(0.2)
    away_s = time.monotonic() - removed
    other = _shown_devices(base_port)
    assert other["e0"] == other["p0"] and {other["e0"], other["d0"]} == {*_devices_of(spare)}
    assert away_s <= max(MAX_AWAY_S, up_s)

    down = run("down", "--deployment", str(file), where)
    assert down.returncode == 0, down.stderr
    assert _instances(base_port) == {}
    again = run("down", "--deployment", str(file), where)
    assert again.returncode == 2 and "this cluster runs no deployment pair" in again.stderr


def _devices_of(node: Any) -> list[str]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return raylet.environ()["ASCEND_RT_VISIBLE_DEVICES"].split(",")
