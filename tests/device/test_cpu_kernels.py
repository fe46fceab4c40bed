"""The compiled CPU kernels against exact arithmetic; and torch in their place where they cannot be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_contract import TOLERANCES, Batch, check_step
from torch import Tensor

from device.ops.cpu import CpuOps
from device.ops.cpu_kernels import FOR_ALL, amx_kernels, cpu_kernels, library_path
from device.ops.linear import Product, linear

needs_amx = pytest.mark.skipif(amx_kernels() is None, reason="no AMX or no g++")
needs_compiler = pytest.mark.skipif(cpu_kernels() is None, reason="no g++")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _close(actual: Tensor, exact: Tensor) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[actual.dtype]
    assert float((actual.double() - exact.double()).abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 300])
@pytest.mark.parametrize("activation", ["none", "swish", "gelu_tanh"])
def test_products_with_what_follows_them(dtype: torch.dtype, rows: int, activation: str) -> None:
    torch.manual_seed(0)
    # rows of the input that lie apart, and a width that fills no last strip
    states = torch.randn(rows, 200).to(dtype)[:, :160]
    weight, bias, other = (torch.randn(*shape).to(dtype) for shape in ((150, 160), (150,), (rows, 150)))
    plain = F.linear(states.double(), weight.double())
    exact = plain + bias.double()
    exact = {"none": exact, "swish": F.silu(exact), "gelu_tanh": F.gelu(exact, approximate="tanh")}[activation]
    product = Product(weight, bias)
    for result, wanted in (
        (product(states, activation), exact),
        (product(states, activation, add=other), exact + other),
        (product(states, activation, multiply=other), exact * other),
        (linear(weight)(states[None])[0], plain),
    ):
        _close(result, wanted)


@needs_amx
def test_weights_in_another_layout_are_left_to_onednn() -> None:
    kernels = amx_kernels()
    assert kernels is not None
    weight = torch.randn(96, 64).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    assert kernels.packed_address(packed, weight) is not None
    assert kernels.packed_address(packed, weight.flip(0)) is None
    for_one_row = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    assert kernels.packed_address(for_one_row, weight) is None
    assert kernels.packed_address(packed, torch.randn(96, 48).bfloat16()) is None


@needs_compiler
@DTYPES
@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(7, 2, 64), (1, 4, 32), (16, 1, 256)])
def test_decodes_read_pages_where_they_lie(group: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Contexts longer than those of the contract's cases."""
    batch = Batch(
        [1, 300, 16, 129, 128],
        [],
        block_size=16,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        seed=0,
        layout="fused",
    )
    assert cpu_kernels().takes_decodes(batch.query.to(dtype), batch.kv_layer.to(dtype))  # type: ignore[union-attr]
    check_step(CpuOps(), batch, dtype, torch.device("cpu"), TOLERANCES[dtype])


@needs_compiler
@DTYPES
@pytest.mark.parametrize(("width", "depth"), [(7, 5), (130, 99)])
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype, width: int, depth: int) -> None:
    torch.manual_seed(0)
    states, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((64, 128), (width, depth), (width,)))
    states, products = states[:, :depth], cpu_kernels()
    assert products is not None
    assert products.takes_rows(states, weight)
    whole = products.linear(states, weight, bias)
    _close(whole, F.linear(states.double(), weight.double(), bias.double()))
    for rows in (1, 2, 3, 6, 15):
        difference = products.linear(states[:rows], weight, bias) - whole[:rows]
        assert float(difference.abs().max()) == 0


def test_without_a_compiler_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code = (
        "import torch; from device.ops.cpu_kernels import amx_kernels, cpu_kernels;"
        "from device.ops.linear import linear; assert amx_kernels() is None and cpu_kernels() is None;"
        "x = torch.eye(32).bfloat16(); assert torch.equal(linear(x)(x), x)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@needs_compiler
def test_a_broken_library_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = library_path(FOR_ALL).read_bytes()
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path))
    library_path(FOR_ALL).write_bytes(whole[:200])
    assert cpu_kernels.__wrapped__() is not None
    assert library_path(FOR_ALL).stat().st_size == len(whole)


@needs_compiler
def test_instances_that_start_side_by_side_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/compiled\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(cpu_kernels.__wrapped__) for _ in range(3)]
    assert all(one.result() is not None for one in found)
    assert (tmp_path / "compiled").read_text() == "\n"
