"""Packed weights in a memory file: what the second process gets, and what is not shared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from device.ops.linear import Linear, gated_linear, linear
from device.ops.plain import PlainOps
from device.ops.shared_weights import shared_weights
from device.weight_files import COPIES, VARIABLE, open_weight_files, to_variable

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 on this CPU"
)
_STATES = torch.ones(3, 64).bfloat16()


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    files = open_weight_files(["part"])
    monkeypatch.setenv(VARIABLE, to_variable(files))
    yield files["part"]
    os.close(files["part"])


def _calls(seed: int, key: str = "key", *, at_once: bool = False) -> tuple[Linear, Linear]:
    """Two products with weights of this seed, as far as the file does not hold others."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(96, 64, generator=generator).bfloat16() for _ in range(3)]
    with shared_weights("part", key, at_once=at_once):
        return linear(weights[0]), gated_linear(weights[1], weights[2], PlainOps().swiglu)


def _products(seed: int, key: str = "key") -> list[Tensor]:
    return [call(_STATES) for call in _calls(seed, key)]


def test_the_second_gets_what_the_first_packed(file: int) -> None:
    first = _products(0)
    assert all(map(torch.equal, _products(1), first))


def test_a_part_that_is_to_be_copied_is_kept_for_others_all_the_same(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COPIES, "part")
    own, copied, mapped = _calls(0), _calls(1), _calls(2, at_once=True)
    first = [call(_STATES) for call in own]
    assert all(
        torch.equal(call(_STATES), one)
        for calls in (copied, mapped)
        for call, one in zip(calls, first, strict=True)
    )
    os.pwrite(file, bytes(1 << 20), 1 << 23)  # over all of the packed weights
    assert all(
        torch.equal(call(_STATES), one) for calls in (own, copied) for call, one in zip(calls, first, strict=True)
    )
    assert not any(call(_STATES).any() for call in mapped), "this one reads the file"


def test_another_process_gets_it_as_well(file: int) -> None:
    expected = _products(0)
    code = "import test_shared_weights as t; print([float(p.double().sum()) for p in t._products(1)])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        pass_fds=[file],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.decode().strip() == str([float(product.double().sum()) for product in expected])


def test_other_models_share_nothing(file: int) -> None:
    first = _products(0)
    other = _products(1, key="another model")
    assert not any(map(torch.equal, other, first))
    assert all(map(torch.equal, _products(2), first))


def test_a_process_that_fails_midway_leaves_nothing_to_be_mapped(file: int) -> None:
    with pytest.raises(RuntimeError, match="midway"), shared_weights("part", "key"):
        linear(torch.zeros(96, 64).bfloat16())
        raise RuntimeError("midway")
    first = _products(0)
    assert float(first[0].abs().sum()) > 0
    assert all(map(torch.equal, _products(1), first))


def test_a_part_without_a_file_is_not_shared(file: int) -> None:
    first = _products(0)
    with shared_weights("another part", "key"):
        product = linear(torch.zeros(96, 64).bfloat16())
    assert float(product(_STATES).abs().sum()) == 0
    assert float(first[0].abs().sum()) > 0
