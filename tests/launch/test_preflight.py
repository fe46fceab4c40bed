"""A mistake is one sentence before anything is started, and before torch or an HTTP client is imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from device.present import Accelerators
from epd_serve.config import DeploymentConfig, change_config, parse_config
from epd_serve.demo import weights_dir
from epd_serve.launch import preflight
from epd_serve.launch.preflight import check_deployment

#: The command with its modules told at its end, and with no way to start a process.
PROGRAM = """
import asyncio, os, subprocess, sys
def started(*_, **__):
    print("STARTED", file=sys.stderr)
    os._exit(9)
subprocess.Popen.__init__ = started
os.fork = started
from epd_serve.cli import main
try:
    main()
finally:
    print("IMPORTED", *sorted({"torch", "transformers", "fastapi"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights_dir(), tmp_path / "model"))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def change(model: Path, text: dict[str, Any] | None = None, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"].update(text or {})
    (model / "config.json").write_text(json.dumps({**config, **fields}))


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def as_text(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "llama"}))
    (model / "preprocessor_config.json").unlink()


#: (deployment file, what is done to the model's directory, what is named); MODEL and TAKEN are put in.
MISTAKES: list[tuple[str, Callable[[Path], None] | None, str]] = [
    ("model: ./nowhere", None, "nowhere"),
    ("model: MODEL", lambda model: change(model, model_type="mllama", architectures=["Mllama"]), "'mllama'"),
    (
        "model: MODEL",
        lambda model: change(model, quantization_config={"quant_method": "awq"}),
        "quantization_config",
    ),
    ("{model: MODEL, topology: PD, instances: {max_model_len: 10000000}}", None, "max_model_len: 10000000"),
    ("{model: MODEL, topology: E-P-D}", as_text, "topology E-P-D"),
    ("model: MODEL", cut, "model.safetensors"),
    ("{topology: EPD, devices: ['cuda:99']}", None, "cuda:99: "),
    ("{topology: EPD, devices: ['npu:99']}", None, "npu:99: "),
    ("gateway: {port: TAKEN}", None, "gateway (gateway.port)"),
    ("{topology: P-D, instances: {kv_cache_bytes: 1000000GiB}}", None, "kv_cache_bytes"),
    ("{topology: P-D, engine: vllm, instances: {kv_cache_bytes: 1000000GiB}}", None, "kv_cache_bytes"),
]


@pytest.mark.parametrize(("text", "spoil", "words"), MISTAKES)
def test_a_mistake_is_named(
    text: str, spoil: Callable[[Path], None] | None, words: str, model: Path, taken: int
) -> None:
    if spoil is not None:
        spoil(model)
    text = text.replace("MODEL", str(model)).replace("TAKEN", str(taken))
    with pytest.raises(ValueError, match=re.escape(words)):
        check_deployment(parse_config(text), {})


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_mistake_is_a_sentence_before_anything_is_imported_or_starts(option: list[str], tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("{topology: EPD, gateway: {port: 0}, instances: {tower_share: 0.3}}")
    command = [sys.executable, "-c", PROGRAM, "up", str(file), *option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "epd0: cpu does not support tower_share" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.endswith("IMPORTED\n") and done.returncode == 2


def show_gpus(monkeypatch: pytest.MonkeyPatch, *memory: int | None) -> None:
    monkeypatch.setattr(preflight, "torch_lacks", lambda kind: "")
    monkeypatch.setattr(preflight, "accelerators", lambda kind: Accelerators(memory_bytes=memory))


@pytest.mark.parametrize(
    ("last", "variables", "words"),
    [
        ("cuda:2", {}, "cuda:2: this machine has only cuda:0 to cuda:1"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "7"}, "device cuda:1: CUDA_VISIBLE_DEVICES=7 shows only 1"),
    ],
)
def test_a_device_is_named_as_the_file_has_it(
    last: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_gpus(monkeypatch, 1 << 30, 1 << 30)
    with pytest.raises(ValueError, match=words):
        check_deployment(DeploymentConfig(topology="E-PD", devices=["cuda:0", last]), variables)


def test_weights_that_a_gpu_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 1 << 20, None)
    config = DeploymentConfig(topology="E-PD", devices=["cuda:1", "cuda:0"])
    with pytest.raises(ValueError, match=r"cuda:0: .* weights"):
        check_deployment(config, {})
    show_gpus(monkeypatch, 100 << 20)
    check_deployment(DeploymentConfig(topology="(E-PD)", devices=["cuda:0"]), {}, ports=False)
    small = DeploymentConfig(topology="(E-PD)", devices=["cuda:0"], roles={"E": {"memory_share": 0.05}})
    with pytest.raises(ValueError, match=r"e0: .* its part \(0\.05\) of the 100MiB of cuda:0; .* memory_share"):
        check_deployment(small, {})


def test_ctrl_c_inside_a_callback_of_the_interpreter_is_not_lost() -> None:
    """Python drops what is raised there, as it does in those of its import system."""
    program = (
        "import os, signal\nfrom epd_serve.cli import ended_by_ctrl_c\n"
        "class Dropped:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "with ended_by_ctrl_c():\n    Dropped()\n"
        "raise SystemExit(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("gateway: {admin: {port: 1, key: {file: DIR/none}}}", "gateway.admin.key"),
        ("cluster_key: {env: EPD_SERVE_NOT_SET}", "cluster_key"),
        ("chat_template: DIR/none", "chat_template"),
        ("chat_template: DIR/broken", "DIR/broken"),
        ("tls: {ca: DIR/a, cert: DIR/b, key: DIR/c}", "tls.ca"),
    ],
)
def test_what_the_file_names_is_looked_for(text: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{% if %}")
    config = parse_config(text.replace("DIR", str(tmp_path)))
    config = change_config(config, {"gateway": {"port": 0}})
    with pytest.raises(ValueError, match=rf"(?m)^{option.replace('DIR', str(tmp_path))}: "):
        check_deployment(config, {})


def test_a_fault_ends_the_fork_server_that_is_importing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, (tmp_path / "errors").open("wb") as errors:
        command = [sys.executable, "-m", "epd_serve.cli", "up", "--port", str(taken.getsockname()[1])]
        failed = subprocess.Popen(command, stderr=errors, start_new_session=True)
        assert failed.wait(300) == 2
    assert "cannot listen" in (tmp_path / "errors").read_text()
    used_s = max(_cpu_s_of(failed.pid), default=0.0)  # until then it may import
    while cpu_s := _cpu_s_of(failed.pid):
        assert max(cpu_s) < used_s + 1.0, "it goes on to import"


def _cpu_s_of(session: int) -> list[float]:
    """Return the CPU seconds of the session's processes that run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cpu_times().user)
    return found
