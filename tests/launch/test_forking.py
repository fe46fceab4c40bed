"""What the fork server imports leaves CUDA alone: a fork of a process that has called it cannot use a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
