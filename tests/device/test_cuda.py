"""The CUDA backend: what it makes of the installed packages (everywhere), and graphs and streams (on a GPU)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from device import cuda, mps
from device.base import DeviceUnavailable
from device.cuda import CudaDevice, make_ops

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no GPU on this machine")
ILLEGAL = """
import torch
from device.base import DeviceLost
from device.registry import get_device
device = get_device("cuda:0")
device.check()
numbers = torch.zeros(4, device="cuda:0")
try:
    numbers[torch.tensor([99], device="cuda:0")].sum().item()
except RuntimeError:
    pass
try:
    device.check()
except DeviceLost as error:
    print(error)
"""
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
import device.cuda, device.registry
print(device.cuda.make_ops(132, (9, 0)).name)
print(device.cuda.make_ops(132, (7, 5)).name)
"""

TORCH_2_11 = """
import torch
from torch.nn.attention import varlen

def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    return query + value

varlen.varlen_attn = varlen_attn
import device.cuda
states = torch.ones(4, 2, 8, dtype=torch.bfloat16)
print(device.cuda.make_ops(132, (9, 0)).encode(states, states, states, [0, 4], 1.0).mean().item())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])


def test_it_works_without_triton_and_says_so() -> None:
    done = run(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr[-2000:]
    hopper, turing = done.stdout.splitlines()
    assert "Triton is not installed" in hopper and "flash" in hopper
    assert turing.startswith("plain torch")


def test_attention_of_a_torch_that_groups_heads_unasked() -> None:
    done = run(TORCH_2_11)
    assert done.stdout == "2.0\n", done.stderr[-2000:]


@pytest.mark.parametrize("lacks", ["a C compiler", "Python's headers"])
def test_a_gpu_does_not_open_where_triton_cannot_compile(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "a C compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", "cc")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DeviceUnavailable, match=f"Triton needs {lacks}: install"):
        make_ops(132, (9, 0))


@ON_GPU
def test_a_device_whose_context_is_broken_is_lost() -> None:
    done = subprocess.run([sys.executable, "-c", ILLEGAL], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("cuda:0 is lost"), done.stderr[-2000:]


def test_a_share_that_nothing_can_give_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = CudaDevice.__new__(CudaDevice)  # it is refused before a GPU is asked
    device.name = "cuda:0"
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    monkeypatch.setenv(mps.SHARE, "50")
    with pytest.raises(ValueError, match=r"share 0\.5 of cuda:0: no nvidia-cuda-mps-control runs, so processes"):
        device.apply_share(0.5)
    monkeypatch.delenv(mps.SHARE)
    mps.pid_file({mps.PIPES: str(tmp_path)}).touch()
    with pytest.raises(ValueError, match="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is not set"):
        device.apply_share(0.5)


def test_a_stream_with_a_share_asks_for_a_green_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SUPPORTED`` of torch 2.13 is not there any more in 2.14, which raises where it makes the context."""
    device = CudaDevice.__new__(CudaDevice)
    device.name, device.index, device.cores, device._green_contexts = "cuda:0", 0, 132, []
    monkeypatch.setattr(device, "activate", lambda: None)
    monkeypatch.delattr(torch.cuda.green_contexts, "SUPPORTED", raising=False)
    context = Mock()
    monkeypatch.setattr(torch.cuda.green_contexts, "GreenContext", context)
    assert device.stream(share=0.5) == context.create.return_value.Stream()
    context.create.assert_called_once_with(num_sms=66, device_id=0)
    context.create.side_effect = RuntimeError("Green Context requires user mode driver 12.8+")
    with pytest.raises(ValueError, match=r"cuda:0 cannot create a green context .*remove tower_share"):
        device.stream(share=0.5)


@ON_GPU
def test_a_graph_is_captured_at_the_priority_of_its_stream() -> None:
    device, data = cuda.open_device(0), torch.zeros(1 << 20, device="cuda")
    seen: list[int] = []

    def step() -> Tensor:
        seen.append(torch.cuda.current_stream().priority)
        return data.add_(1)

    runner = device.graph_runner()
    with device.stream(-1) as stream:
        runner.capture(1, step)
        data.zero_()
        for _ in range(5):
            runner.replay(1)
        stream.synchronize()
    assert set(seen) == {-1} and data.eq(5).all()
