import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from device import cpu, registry
from device.cpu import CpuDevice
from device.ops.cpu import CpuOps
from epd_serve import __version__, cli
from epd_serve.config import InstanceOptions
from epd_serve.demo import weights_dir
from epd_serve.types import Role
from proxy.main import Reread


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["epd-serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, function: str, **more: Any) -> list[Any]:
    """Put a module in place whose ``function`` remembers its arguments; ``more`` is what else is in it."""
    calls: list[Any] = []
    module = ModuleType(name)
    setattr(module, function, lambda *arguments, **named: calls.append((*arguments, *([named] if named else []))))
    vars(module).update(more)
    monkeypatch.setitem(sys.modules, name, module)
    return calls


OPTIONS = InstanceOptions(
    name="ep1",
    role=Role.parse("EP"),
    model=weights_dir(),
    served_model_name="tiny",
    host="10.0.0.1",
    port=9000,
    device="npu:1",
    dtype="bfloat16",
    threads=3,
    share=0.5,
    share_start=0.25,
    memory_share=0.75,
    stream_priority=-3,
    device_board="/tmp/board:2",
    block_size=32,
    num_blocks=100,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    async_scheduling="off",
    max_model_len=4096,
    generation_config="off",
    image_budget_pixels=1000,
    feature_store_bytes=2000,
    feature_cache_bytes=3000,
    feature_batch=4,
    feature_batch_ms=250.0,
    media_cpu_s=1.25,
    feature_timeout_s=1.5,
    queue_timeout_s=3.5,
    lease_s=2.5,
    drain_s=7.5,
    kv_transport="tcp",
    feature_store="mooncake",
    mooncake_master="10.0.0.2:50051",
    mooncake_protocol="rdma",
    mooncake_devices="mlx5_0,mlx5_1",
    mooncake_staging_bytes=4000,
    kv_mode="pull",
    kv_group_layers=2,
    feature_prefetch="sync",
    slo_ttft_ms=1200.5,
    slo_tpot_ms=50.0,
    batching_alpha=0.25,
    batching_order="slack",
    batching_policy="unlimited",
    batching_encodes="after-prefill",
    steals=True,
    link_bandwidth=5000,
    link_latency_ms=0.5,
    switch_dir=Path("/run/roles"),
    join="http://127.0.0.1:8001",
    trace=Path("/traces"),
)


def test_every_instance_option_is_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    defaults = {field.name: field.default for field in fields(InstanceOptions)}
    same = {name for name, default in defaults.items() if getattr(OPTIONS, name) == default}
    assert same == {"kv_cache_bytes"}, "the test shall change every option, of which two exclude each other"
    calls = fake_module(monkeypatch, "epd_serve.instance.main", "run_instance", end_process=lambda: None)
    monkeypatch.setattr(cli, "model_path", Path)
    assert run(monkeypatch, "instance", *OPTIONS.to_arguments()) == 0
    by_bytes = ["--name", "e0", "--role", "E", "--kv-cache-bytes", "5000"]
    assert run(monkeypatch, "instance", *by_bytes) == 0
    assert calls[0] == (OPTIONS,)
    assert calls[1][0].kv_cache_bytes == 5000
    assert calls[1][0].served_model_name == "demo"
    unchanged = {"name", "role", "model", "served_model_name", "kv_cache_bytes"}
    assert all(getattr(calls[1][0], name) == value for name, value in defaults.items() if name not in unchanged)


def test_proxy_passes_configuration_instances_and_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("gateway: {host: 127.0.0.9, port: 1234, request_timeout_s: 5}")
    calls = fake_module(monkeypatch, "proxy.main", "run_gateway", Reread=Reread)
    instances = ("--instance", "e0=http://a:1", "--instance", "pd0=http://b:2/")
    assert run(monkeypatch, "proxy", "--config", str(file), *instances) == 0
    assert run(monkeypatch, "proxy", "--config", str(file), *instances, "--host", "0.0.0.0", "--port", "0") == 0
    config, named, *address, reread, rest = calls[0]
    assert rest == {"controls": False, "place": None, "orders": None}, (
        "what up starts gives orders, no other gateway"
    )
    assert config.gateway.request_timeout_s == 5
    assert named == [("e0", "http://a:1"), ("pd0", "http://b:2")]
    assert address == ["127.0.0.9", 1234]
    assert calls[1][2:4] == ("0.0.0.0", 0)
    file.write_text("gateway: {request_timeout_s: 6}")
    again = reread.read()
    assert (again.gateway.request_timeout_s, reread.instances(again)) == (6, named)


def test_proxy_finds_the_instances_of_its_deployment_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("{topology: E-PD, instances: {base_port: 7000}}")
    calls = fake_module(monkeypatch, "proxy.main", "run_gateway", Reread=Reread)
    assert run(monkeypatch, "proxy", "--config", str(file)) == 0
    assert calls[0][1] == [("e0", "http://127.0.0.1:7000"), ("pd0", "http://127.0.0.1:7001")]
    file.write_text("{topology: E-PD, instances: {base_port: 0}}")
    assert run(monkeypatch, "proxy", "--config", str(file)) == 2
    assert "add --instance NAME=URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("topology", "E-Q-D"), "'Q' is no stage"),
        (("proxy", "--instance", "e0"), "write NAME=URL"),
        (("proxy", "--instance", "e0=http://a:1", "--instance", "e0=http://a:2"), "e0 is named twice"),
        (("instance", "--name", "x", "--role", "EX"), "role 'EX': 'X' is no stage"),
        (("instance", "--name", "x", "--role", "E", "--model", "/no/model"), "there is no directory /no/model"),
        (
            ("instance", "--name", "x", "--role", "P", "--num-blocks", "1", "--kv-cache-bytes", "1"),
            "give one of them",
        ),
        (("up", "/no/such/file.yaml"), "/no/such/file.yaml: No such file or directory"),
        (("up", "--topology", "E"), "command line: topology: topology 'E', position 2: no instance prefills"),
        (("up", "--model", "/no/model"), "there is no directory /no/model"),
    ],
)
def test_what_a_user_got_wrong_is_one_clean_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("epd-serve: ")
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_SERVE_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["epd-serve", "topology", "E"])
    with pytest.raises(ValueError, match="no instance prefills"):
        cli.main()


def test_topology_draws_and_explains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "topology", "2(E-P)-1D") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2(E-P)-D\n")
    assert "2 × device 0…1" in shown
    assert "device 2: d0 decodes tokens." in shown


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "version") == 0
    assert capsys.readouterr().out == f"epd-serve {__version__}\n"


def test_devices_shows_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "devices") == 0
    output = capsys.readouterr().out
    assert "cpu" in output
    assert "passed" not in output


def test_devices_check_tests_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(registry, "KINDS", ("cpu", "npu"))
    assert run(monkeypatch, "devices", "--check") == 0
    output = capsys.readouterr().out
    assert "npu" in output and "not available" in output
    for check in ("attention over the paged cache, bfloat16", "memory", "collectives", "transport: TCP"):
        assert check in output
    assert "FAILED" not in output


def test_devices_check_fails_with_the_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(registry, "KINDS", ("cpu",))
    monkeypatch.setattr(CpuDevice, "dtypes", (torch.float32,))
    monkeypatch.setattr(CpuOps, "swiglu", lambda ops, gate_up: gate_up[..., : gate_up.shape[-1] // 2])
    assert run(monkeypatch, "devices", "--check") == 1
    output = capsys.readouterr().out
    assert output.count("FAILED") == 1
    assert "numbers differ from the oracle's" in output
    assert "do not serve on cpu" in output


def test_devices_check_fails_with_a_device_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("the device is busy")

    monkeypatch.setattr(registry, "KINDS", ("cpu",))
    monkeypatch.setattr(cpu, "open_device", broken)
    assert run(monkeypatch, "devices") == 0
    assert run(monkeypatch, "devices", "--check") == 1


NO_TORCH = """
import sys
sys.argv = ["epd-serve", *{arguments!r}]
from epd_serve import cli
import epd_serve.launch.up
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("arguments", [["proxy", "--help"], ["up", "--help"], ["topology", "E-P-D"], ["schema"]])
def test_no_torch_is_loaded_outside_instances(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr


def test_instances_without_torch_say_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom epd_serve.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "instance", "--name", "e0", "--role", "E"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "epd-serve: torch is not installed; run in epd-serve's clone: pip install '.[native]'\n"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "epd_serve.cli", "version"], capture_output=True, text=True, timeout=150
    )
    assert done.stdout == f"epd-serve {__version__}\n"
