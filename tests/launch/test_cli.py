import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from device import registry
from device.cpu import CpuDevice
from device.ops.cpu import CpuOps
from epd_serve import cli
from epd_serve.config import InstanceOptions
from epd_serve.config.shares import DeviceShare
from epd_serve.demo import weights_dir
from epd_serve.types import Role


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


def test_an_instance_is_what_its_flags_and_its_file_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_module(monkeypatch, "epd_serve.instance.main", "run_instance", end_process=lambda: None)
    bare = ("instance", "--name", "e0", "--role", "E")
    assert run(monkeypatch, *bare) == 0
    defaults = {"name": "e0", "role": Role.parse("E"), "model": weights_dir(), "served_model_name": "demo"}
    assert calls.pop() == (InstanceOptions(**defaults, dtype="auto"),)
    file = tmp_path / "deployment.yaml"
    file.write_text(
        "{topology: 2E-PD, served_model_name: tiny, slo: {tpot_ms: 50}, instances: {host: 10.0.0.1, threads: 2},"
        " roles: {E: {share: 0.5, feature_cache_bytes: 1MiB}}}"
    )
    flags = ("--config", str(file), "--port", "9000", "--device", "npu:1", "--join", "http://127.0.0.1:8001")
    named = {"port": 9000, "device": "npu:1", "join": ("http://127.0.0.1:8001",), "served_model_name": "tiny"}
    of_file = {"feature_cache_bytes": 1 << 20, "device_share": DeviceShare(share=0.5, start=0.0), "dtype": "auto"}
    for more, host, threads in (((), "10.0.0.1", 2), (("--host", "10.0.0.2", "--threads", "7"), "10.0.0.2", 7)):
        assert run(monkeypatch, *bare, *flags, *more) == 0
        [chosen] = calls.pop()
        expected = named | of_file | {"host": host, "threads": threads}
        assert {name: getattr(chosen, name) for name in expected} == expected and chosen.slo.tpot_ms == 50
    assert run(monkeypatch, "instance", "--options", chosen.to_json()) == 0
    assert calls.pop() == (chosen,)


def test_a_gateway_has_the_instances_of_its_flags_or_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("{topology: E-PD, gateway: {host: 127.0.0.9, port: 1234}, instances: {base_port: 7000}}")
    calls = fake_module(monkeypatch, "proxy.main", "run_gateway")
    named = ("--instance", "e0=http://a:1", "--instance", "pd0=http://b:2/")
    for flags, told, address in (
        (named, [("e0", "http://a:1"), ("pd0", "http://b:2")], ["127.0.0.9", 1234]),
        (
            ("--host", "0.0.0.0", "--port", "0"),
            [("e0", "http://127.0.0.1:7000"), ("pd0", "http://127.0.0.1:7001")],
            ["0.0.0.0", 0],
        ),
    ):
        assert run(monkeypatch, "proxy", "--config", str(file), *flags) == 0
        assert calls.pop()[1:4] == (told, *address)
    file.write_text("{topology: E-PD, instances: {base_port: 0}}")
    assert run(monkeypatch, "proxy", "--config", str(file)) == 2
    assert "--instance NAME=URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("topology", "E-Q-D"), "'Q' is not a stage"),
        (("proxy", "--instance", "e0"), "write NAME=URL"),
        (("proxy", "--instance", "e0=http://a:1", "--instance", "e0=http://a:2"), "e0 is given twice"),
        (("instance", "--name", "x", "--role", "EX"), "role 'EX': 'X' is not a stage"),
        (("instance", "--name", "x", "--role", "E", "--model", "/no/model"), "/no/model is not a directory"),
        (("instance", "--role", "P"), "an instance needs --name and --role"),
        (("instance", "--name", "p0", "--role", "P", "--host", "0.0.0.0"), "add --advertise ADDRESS"),
        (("up", "/no/such/file.yaml"), "/no/such/file.yaml: No such file or directory"),
        (("up", "--topology", "E"), "command line: topology: topology 'E', position 2: no instance prefills"),
        (("up", "/no/model"), "/no/model is not a directory"),
        (("up", "one", "two"), "takes one model or deployment file"),
        (("up", "one", "--model", "two"), "give one of them"),
        (("up", "one", "--tensor-parallel-size=2"), "--tensor-parallel-size: use the topology's @tp"),
        (("up", "-tp", "2", "one"), "-tp: use the topology's @tp"),
        (("up", "--enforce-eager"), "instances.engine_args"),
        (("up", "--engine", "vllm"), "engine is a key of a deployment file"),
        (("up", "--api-key", " "), "--api-key is empty"),
        (("up", "--dtype", "half"), "command line: dtype: "),
        (("serve", "one"), "serve: use 'epd-serve up MODEL'"),
        (("stop",), "'epd-serve down'"),
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


@pytest.mark.parametrize("broken", [False, True])
def test_devices_are_shown_and_checked(
    broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(registry, "KINDS", ("cpu", "npu"))
    monkeypatch.setattr(CpuDevice, "dtypes", (torch.float32,))
    if broken:
        monkeypatch.setattr(CpuOps, "swiglu", lambda ops, gate_up: gate_up[..., : gate_up.shape[-1] // 2])
    assert run(monkeypatch, "devices", "--check") == broken
    output = capsys.readouterr().out
    assert "npu" in output and "not available" in output and "transport: TCP" in output
    assert output.count("FAILED") == broken


LEAN = """
import sys
sys.argv = ["epd-serve", *{arguments!r}]
from epd_serve import cli
{module}
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = {others!r} & {{*sys.modules}}
assert not loaded, loaded
"""
HEAVY = {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("module", "arguments", "others"),
    [
        ("import proxy.main, epd_serve.launch.up", ["topology", "E-P-D"], HEAVY),
        ("", ["up", "-h"], HEAVY | {"aiohttp", "rich"}),
        ("", ["--help"], HEAVY | {"aiohttp", "pydantic", "rich"}),
    ],
)
def test_a_command_imports_only_what_it_needs(module: str, arguments: list[str], others: set[str]) -> None:
    program = LEAN.format(module=module, arguments=arguments, others=others)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_instances_without_torch_say_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom epd_serve.cli import main; main()"
    command = [sys.executable, "-c", program, "instance", "--name", "e0", "--role", "E"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "epd-serve: torch is not installed; run in epd-serve's clone: pip install '.[native]'\n"


def test_up_takes_a_model_with_options_in_the_words_of_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(weights_dir().parent)
    options = ("--served-model-name", "tiny", "--max-model-len", "1000", "--api-key", "secret", "--devices", "cpu")
    assert run(monkeypatch, "up", weights_dir().name, *options, "--dtype", "float32", "--dry-run") == 0
    shown = capsys.readouterr().out
    for words in ('"served_model_name": "tiny"', '"max_model_len": 1000', '"dtype": "float32"', " on cpu,"):
        assert words in shown, shown
    assert str(weights_dir()) in shown and "secret" not in shown
