"""Loading: the host holds a piece of a weight at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from chips import CHIP
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from device import host
from device.registry import get_device
from epd_serve.models import stored_weights
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import ModelPart, load_part
from epd_serve.models.stored_weights import PIECE_BYTES, StoredWeight, listed_weights, read_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as that the layers of its language model are most of it: 175 MB of float32."""
    return tiny_models.make_tiny_model(
        "qwen2_5_vl", tmp_path_factory.mktemp("wide") / "model", intermediate_size=22000
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each read from a file."""
    sizes: list[int] = []

    def counting(read: Any) -> Any:
        def counted(*given: Any, **options: bool) -> Tensor:
            part: Tensor = read(*given, **options)
            sizes.append(part.nbytes)
            return part

        return counted

    for name in ("read", "map"):
        monkeypatch.setattr(stored_weights._File, name, counting(getattr(stored_weights._File, name)))
    yield sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_loading_reads_each_weight_once_and_the_host_holds_a_piece(
    path: Path, dtype: torch.dtype, reads: list[int]
) -> None:
    device = get_device(CHIP)
    LanguageModel(path, dtype, device)  # all that is imported and kept for good
    with safe_open(path / "model.safetensors", framework="pt") as weights:
        names = [name for name in weights.keys() if not name.startswith("visual.")]  # noqa: SIM118
        whole = sum(4 * torch.Size(weights.get_slice(name).get_shape()).numel() for name in names)
    gc.collect()
    reads.clear()
    in_use, on_device = host.reset_peak_memory(), device.reset_peak_memory()
    model = LanguageModel(path, dtype, device)
    grown, kept = host.peak_memory() - in_use, device.peak_memory() - on_device
    assert max(reads) <= PIECE_BYTES
    assert sum(reads) <= 1.02 * whole
    assert kept < 1.4 * whole / 4 * dtype.itemsize, "a fused weight lies there in parts once"
    assert grown < kept + 5 * PIECE_BYTES, f"{grown >> 20} MiB of the host, {kept >> 20} of them the device's"
    del model


def test_a_part_of_a_weight_is_read_alone(tmp_path: Path, reads: list[int]) -> None:
    values = torch.arange(24.0).view(4, 6)
    save_file({"a": values, "b": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    listed = listed_weights(tmp_path, CPU)
    weight, number = (nn.Parameter(listed[name][...].to(CPU, torch.float32)) for name in ("a", "b"))
    part = weight.detach()[1:3][:, -2:]
    assert isinstance(part, StoredWeight) and part.shape == (2, 2)
    assert not reads
    assert torch.equal(part.to(CPU), values[1:3, 4:])
    assert reads == [16]
    assert torch.equal(weight[5:].to(CPU), values[5:]), "no rows"
    assert torch.equal(weight.to(CPU, torch.bfloat16), values.bfloat16())
    assert torch.equal(torch.stack([weight, weight]), torch.stack([values, values]))
    assert torch.equal(weight[::2], values[::2])
    assert torch.equal(number.to(CPU), torch.tensor(3.0))


def test_what_is_tied_is_one_weight_on_the_device(tmp_path: Path) -> None:
    """Also where the checkpoint has it twice; not where the two differ."""
    path = tiny_models.make_tiny_model("qwen2", tmp_path / "model")
    file = path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "embed_tokens" in name)
    for head, is_one in ((None, True), (weights[name].clone(), True), (weights[name] + 1, False)):
        save_file(
            weights if head is None else {**weights, "lm_head.weight": head}, file, metadata={"format": "pt"}
        )
        model: Any = load_part(path, ModelPart.LANGUAGE_MODEL, torch.float32)
        model = read_weights(model, CPU)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_one
        expected = weights[name] if head is None else head
        assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", None])
def test_a_broken_file_is_refused_before_anything_is_read(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10, 10)}, file)
    file.write_bytes(file.read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match="safetensors"):
        listed_weights(tmp_path, CPU)
