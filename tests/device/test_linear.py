"""Packed products against plain ones: every number of rows, with and without bias, and inside a module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from device.ops.linear import PackedLinear, gated_linear, pack_modules
from device.ops.plain import PlainOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _close(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    scale = float(exact.abs().max())
    assert float((actual.double() - exact).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_gated_linear(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    states, gate, up = (torch.randn(count, 96).to(dtype) for count in (rows, 160, 160))
    exact = F.silu(states.double() @ gate.double().T) * (states.double() @ up.double().T)
    _close(gated_linear(gate, up, PlainOps().swiglu)(states), exact, dtype)


def test_modules_are_packed_in_place_and_subclasses_left_alone() -> None:
    class Special(nn.Linear):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.Sequential(nn.GELU(), nn.Linear(48, 32, bias=False)), Special(32, 8)
    )
    model = model.bfloat16().requires_grad_(False)
    states = torch.randn(5, 64).bfloat16()
    expected = model(states).double()
    pack_modules(model)
    assert isinstance(model[0], PackedLinear)
    assert isinstance(model[1][1], PackedLinear)
    assert type(model[2]) is Special
    _close(model(states), expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_convolution_over_single_patches_is_a_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 24, kernel_size=(2, 4, 4), stride=(2, 4, 4)).requires_grad_(False)
    patches = torch.randn(7, 3, 2, 4, 4).to(dtype)
    model = nn.Sequential(convolution.to(dtype))
    expected = model.double()(patches.double())
    model.to(dtype)
    pack_modules(model)
    assert model(patches).shape == expected.shape
    _close(model(patches), expected, dtype)
