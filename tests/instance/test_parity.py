"""Features by another producer: taken in when they are the same, and not when the tower or its input differs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import noise, png
from services import serving
from tiny_models import make_tiny_model
from torch import Tensor

from device.cpu import CpuDevice
from device.ops.cpu import CpuOps
from device.ops.plain import PlainOps
from epd_serve.errors import InstanceFailed, ServeError
from epd_serve.instance import parity
from epd_serve.instance.http import Peers
from epd_serve.instance.instance import Instance
from epd_serve.instance.loading.model import tensor_data
from epd_serve.instance.parity import BOUNDS, difference, fixed_inputs, sample_of
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.protocol import wire

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class On(CpuDevice):
    """A CPU with other operators."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.ops = ops


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("parity"))


def feature(
    path: Path, ops: Any, dtype: torch.dtype, change: Callable[[Any], Any] = lambda inputs: inputs
) -> Tensor:
    inputs, _ = fixed_inputs(load_family(path))
    return Tower(path, dtype, On(ops)).encode([change(inputs)])[0]


def differs(theirs: Tensor, ours: Tensor) -> str:
    return difference(sample_of("other", theirs, tensor_data(theirs)), ours)


def swapped(inputs: Any) -> Any:
    """Patches are [.., channel, time, height, width] rows: their channels in the other order."""
    patches = inputs["pixel_values"]
    inputs["pixel_values"] = patches.view(len(patches), 3, -1).flip(1).reshape(patches.shape)
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_operators_pass_and_other_features_do_not(dtype: str, path: Path) -> None:
    ours = feature(path, CpuOps(), DTYPES[dtype])
    theirs = feature(path, PlainOps(), DTYPES[dtype])
    assert differs(theirs, ours) == ""
    assert "scale +" in differs((theirs.float() * 1.01).to(ours.dtype), ours)
    assert "cosine" in differs(feature(path, PlainOps(), DTYPES[dtype], swapped), ours)
    assert "is right" in differs(theirs[1:], ours)
    assert "is right" in differs(theirs.to(torch.float64), ours)
    assert "cosine" in differs(theirs * torch.nan, ours)
    one_token = theirs.clone()
    one_token[3] = one_token[4]
    assert "cosine" in differs(one_token, ours), "a single wrong token"
    assert set(BOUNDS) == set(DTYPES)


@asynccontextmanager
async def pair(path: Path, patch: pytest.MonkeyPatch, mode: str) -> AsyncIterator[tuple[Instance, Instance]]:
    """An E with plain operators, and a P with a CPU's own."""
    with patch.context() as other:
        other.setattr("device.cpu.CpuOps", PlainOps)
        async with serving(path, "E") as e:
            other.undo()
            async with serving(path, "P", parity=mode) as p:
                yield e, p


async def encoded(e: Instance, p: Instance, request_id: str, seed: int) -> None:
    picture = noise(seed, (56, 56))
    ref = wire.MediaRef(f"hash{seed}", *picture.size)
    request = wire.EncodeRequest(request_id, ref, png(picture), announce_to=p.url)
    await e.encode.encode(request)


def count(p: Instance, admitted: str) -> float:
    labels = {"producer": "cpu: plain torch", "admitted": admitted}
    return p.metrics.registry.get_sample_value("epd_serve_instance_feature_producers_total", labels) or 0.0


async def test_a_producer_shows_a_picture_once_and_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    monkeypatch.setattr(parity, "difference", lambda *of: judged.append(difference(*of)) or judged[-1])
    async with pair(path, monkeypatch, "refuse") as (e, p):
        assert (e.info().producer, p.info().producer) == ("cpu: plain torch", "cpu: plain torch (CPU)")
        for seed in (1, 2):
            await encoded(e, p, f"r{seed}", seed)
        assert judged == [""] and count(p, "true") == 2
        assert p.encode.num_parameters == 0, "the tower was loaded for the comparison alone"


@pytest.mark.parametrize("mode", ["warn", "refuse", "off"])
async def test_another_tower_is_warned_of_or_refused(
    mode: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(path, monkeypatch, mode) as (e, p):
        real = e.encode._loaded_tower()
        monkeypatch.setattr(real, "encode", lambda inputs: [one * 1.01 for one in Tower.encode(real, inputs)])
        if mode == "refuse":
            with pytest.raises(InstanceFailed, match=r"refused here \(parity: refuse\).*scale \+1.00%"):
                await encoded(e, p, "r", 1)
        else:
            await encoded(e, p, "r", 1)
        assert count(p, "true" if mode != "refuse" else "false") == 1
        assert ("are not those of" in caplog.text) is (mode != "off")


async def test_a_sample_that_is_nothing_lets_nobody_in(path: Path) -> None:
    peers = Peers()
    async with serving(path, "P", parity="refuse") as p:
        sample = wire.ParitySample("npu: other", [3, 5], "float32", b"short")
        await peers.call(p.url, "/feature/parity", sample)
        with pytest.raises(ServeError, match="features by npu: other are refused here"):
            p.parity.admit("npu: other")
        await peers.close()
