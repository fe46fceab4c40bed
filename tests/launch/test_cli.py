import subprocess
import sys

import pytest
import torch
from program import run_cli

from device import registry
from device.cpu import CpuDevice
from device.ops.cpu import CpuOps
from epd_serve.demo import weights_dir


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
        (("instance", "--name", "x", "--role", "E", "--join", "gateway:8001"), "is not the URL of a server"),
        (("profile", "/no/such/x.json", "--model", "demo"), "/no/such/x.json cannot be written"),
        (("up", "model.gguf"), "GGUF is not supported"),
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
    ],
)
def test_what_a_user_got_wrong_is_one_clean_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert run_cli(*arguments) == 2
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
    assert run_cli("devices", "--check") == broken
    output = capsys.readouterr().out
    assert "npu" in output and "not available" in output and "passed" in output
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
        ("import device.registry, epd_serve.models.families", ["topology", "E-P-D"], HEAVY),
        ("import epd_serve.sim.simulator, epd_serve.sim.workloads", ["topology", "E-P-D"], HEAVY),
        (
            "import epd_serve.instance.main, epd_serve.instance.loading.shape_model",
            ["topology", "E-P-D"],
            HEAVY,
        ),
        ("", ["up", "-h"], HEAVY | {"aiohttp", "rich"}),
        ("", ["--help"], HEAVY | {"aiohttp", "pydantic", "rich"}),
    ],
)
def test_only_what_is_needed_is_imported(module: str, arguments: list[str], others: set[str]) -> None:
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
    assert run_cli("up", weights_dir().name, *options, "--dtype", "float32", "--dry-run") == 0
    shown = capsys.readouterr().out
    for words in ('"served_model_name": "tiny"', '"max_model_len": 1000', '"dtype": "float32"', " on cpu,"):
        assert words in shown, shown
    assert str(weights_dir()) in shown and "secret" not in shown
