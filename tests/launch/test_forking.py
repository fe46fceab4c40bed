"""The fork server imports modules without a call of CUDA, after which no fork can use a GPU, or ends clearly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program import read_until

#: In front of the driver and of CUDA's runtime.
SPY = """
#include <unistd.h>
#define SPY(name) int name(void *a, void *b, void *c) { write(2, "CALLED\\n", 7); return 100; }
SPY(cuInit) SPY(cudaGetDeviceCount) SPY(cudaGetDevice) SPY(cudaSetDevice)
"""
PROGRAM = """
import sys
import epd_serve.cli.instance, epd_serve.instance.loading.checkpoint, device.cuda
print("IMPORTED", file=sys.stderr, flush=True)
import torch
try:
    torch.cuda.init()
except RuntimeError:
    pass
"""


@pytest.mark.skipif(torch.version.cuda is None or shutil.which("gcc") is None, reason="needs CUDA's torch and gcc")
def test_modules_of_instances_are_imported_without_a_call_of_cuda(tmp_path: Path) -> None:
    (tmp_path / "spy.c").write_text(SPY)
    spy = tmp_path / "spy.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", spy, tmp_path / "spy.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(spy), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    before, _, after = done.stderr.partition("IMPORTED")
    assert "CALLED" not in before
    assert "CALLED" in after, "the spy sees nothing"


UP = [sys.executable, "-m", "epd_serve.cli", "up", "--port", "0", "--topology"]


def with_torchvision(folder: Path, source: str) -> dict[str, str]:
    """An environment in which importing torchvision runs ``source``."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parents[2])))}


def test_modules_that_cannot_be_imported_end_up_with_a_sentence(tmp_path: Path) -> None:
    environment = with_torchvision(tmp_path, 'raise RuntimeError("of another build than torch")')
    done = subprocess.run([*UP, "EPD"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "of another build than torch" in done.stderr
    assert "repair the environment" in done.stdout + done.stderr


@pytest.mark.parametrize("topology", ["EPD", "40EPD"])  # more than start at once
def test_ctrl_c_in_a_terminal_does_not_wait_for_imports(tmp_path: Path, topology: str) -> None:
    environment = with_torchvision(tmp_path, "import time\ntime.sleep(600)")
    with subprocess.Popen(
        [*UP, topology],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        try:
            read_until(up, "gateway  starting")
            os.killpg(up.pid, signal.SIGINT)
            said, _ = up.communicate(timeout=60)
        finally:
            up.kill()
    assert up.returncode == 0 and "Traceback" not in said


def test_the_last_error_of_a_script_without_a_guard_names_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from epd_serve.config import parse_config\n"
        "from epd_serve.launch.deployment import LocalDeployment\n"
        "async def main():\n"
        "    async with LocalDeployment(parse_config('{topology: EPD, gateway: {port: 0}}')):\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "guard your script with 'if __name__ ==" in "".join(done.stderr.splitlines()[-2:])
