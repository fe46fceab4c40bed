"""Partial loading: each stage holds its own weights and no others, and a missing weight is an error."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from chips import CHIP
from program import run_file
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from device import host
from device.registry import get_device
from epd_serve.config.model_files import check_model_files, read_model_config
from epd_serve.models.families import family_of
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import ModelPart, load_family, load_part, media_fingerprint, num_parameters


def test_the_parts_make_the_whole_and_share_nothing(tiny_model: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(tiny_model)
    tower = load_part(tiny_model, ModelPart.TOWER, torch.float32)
    language = load_part(tiny_model, ModelPart.LANGUAGE_MODEL, torch.float32)
    assert num_parameters(tower) + num_parameters(language) == num_parameters(whole)
    weights = dict(whole.named_parameters())
    tower_names = {name for name, _ in tower.named_parameters()}
    language_names = {name for name, _ in language.named_parameters()}
    assert not tower_names & language_names
    assert not any("language_model" in name or "lm_head" in name for name in tower_names)
    assert all("language_model" in name or "lm_head" in name for name in language_names)
    for name, parameter in (*tower.named_parameters(), *language.named_parameters()):
        assert torch.equal(parameter, weights[name]), name


def _lacks(weights: dict[str, torch.Tensor], victim: str) -> str:
    del weights[victim]
    return "lacks a weight "


def _has_more(weights: dict[str, torch.Tensor], victim: str) -> str:
    weights[f"{victim}_scale_inv"] = torch.ones(2)
    return "has a weight .*_scale_inv, which a model of its config.json does not have"


def _has_another_shape(weights: dict[str, torch.Tensor], victim: str) -> str:
    weights[victim] = weights[victim][:-1].clone()
    return "has the shape "


#: Of each way to name the parts; the others' names are those of one of these.
_NAMED = ("qwen2_5_vl", "gemma3")


@pytest.mark.parametrize(
    "kind",
    [
        *_NAMED,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                *tiny_models.KINDS,
                *tiny_models.STATE_KINDS,
                *tiny_models.OMNI_KINDS,
                *tiny_models.FAMILY_KINDS,
            )
            if kind not in _NAMED
        ),
    ],
)
@pytest.mark.parametrize("part", ModelPart)
def test_weights_are_those_of_the_configuration(tmp_path: Path, kind: str, part: ModelPart) -> None:
    """One too few, one too many, one of another shape: refused by name, by the instance whose part it is."""
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    whole = load_file(path / "model.safetensors")
    towers = ("visual.", "audio_tower.", "vision_tower.", "multi_modal_projector.", "image_newline")
    towers += ("vision_model.", "connector.", "merger.", "embed_vision.", "vision_embedder.", "embed_audio.")
    others = family_of(AutoConfig.from_pretrained(path)).other_parts
    victims = [
        name
        for name in whole
        if name.endswith("weight")
        and not name.startswith(others)
        and "embed_tokens" not in name  # tied to the head where there is none
        and any(tower in name for tower in towers) == (part is ModelPart.TOWER)
    ]
    for victim in (victims[0], victims[-1]):
        for change in (_lacks, _has_more, _has_another_shape):
            weights = dict(whole)
            message = change(weights, victim)
            save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(ValueError, match=message) as caught:
                load_part(path, part, torch.float32)
            # transformers may have renamed what stands before
            assert ".".join(victim.split(".")[-2:]) in str(caught.value)
            if victim is victims[0]:
                load_part(path, next(other for other in ModelPart if other is not part), torch.float32)


def test_a_weight_of_no_part_is_refused_by_all(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    weights = {**load_file(path / "model.safetensors"), "mtp.fc.weight": torch.ones(2)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for part in ModelPart:
        with pytest.raises(ValueError, match=r"a weight mtp\.fc\.weight"):
            load_part(path, part, torch.float32)


def test_of_a_model_that_also_speaks_the_thinker_is_read(tmp_path: Path) -> None:
    """As Qwen publishes it: in a checkpoint of all parts."""
    path = tiny_models.make_tiny_model("qwen2_5_omni", tmp_path / "model")
    parts = {
        part: {name: weight.clone() for name, weight in load_part(path, part, torch.float32).state_dict().items()}
        for part in ModelPart
    }
    thinker = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
    weights = {f"thinker.{name}": weight for name, weight in load_file(path / "model.safetensors").items()}
    weights |= {"talker.model.norm.weight": torch.ones(2), "token2wav.dit.proj.weight": torch.ones(2)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for part, expected in parts.items():
        found = load_part(path, part, torch.float32).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert set(load_family(path).token_ids) == {"image", "video", "audio"}
    assert read_model_config(path)["model_type"] == "qwen2_5_omni_thinker"
    assert check_model_files(path)["tower"] > 0


def test_the_fingerprint_names_weights_processor_and_dtype(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("llava", tmp_path / "model")
    names = {media_fingerprint(path, "float32"), media_fingerprint(path, "bfloat16")}
    processor = path / "preprocessor_config.json"
    original = processor.read_text()
    processor.write_text(original.replace("true", "false"))
    names.add(media_fingerprint(path, "float32"))
    processor.write_text(original)
    weights = load_file(path / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    names.add(media_fingerprint(path, "float32"))
    assert len(names) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_host_holds_few_weights_while_they_go_to_a_device(tmp_path: Path, dtype: str) -> None:
    """Most of the model is its wide layers: 175 MB of float32."""
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model", intermediate_size=22000)
    weights = load_file(path / "model.safetensors")
    own = [4 * weight.numel() for name, weight in weights.items() if not name.startswith("visual.")]
    # freed memory goes back at once: the peak is what was in use, whichever thread took it
    tunables = "glibc.malloc.mmap_threshold=131072"
    grown, kept = json.loads(run_file(__file__, str(path), dtype, timeout_s=300, GLIBC_TUNABLES=tunables))
    assert kept < 1.4 * sum(own) / 4 * getattr(torch, dtype).itemsize, "a fused weight lies there in parts once"
    assert grown < kept + 8 * max(own), f"{grown >> 20} MiB of the host, {kept >> 20} of them the device's"


def _load(path: Path, dtype: torch.dtype) -> tuple[int, int]:
    """Load a model twice; return the growth of the host's and of the device's memory the second time."""
    device = get_device(CHIP)
    LanguageModel(path, dtype, device)  # all that is imported and kept for good
    gc.collect()
    in_use, on_device = host.reset_peak_memory(), device.reset_peak_memory()
    model = LanguageModel(path, dtype, device)
    grown, kept = host.peak_memory() - in_use, device.peak_memory() - on_device
    del model
    return grown, kept


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
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_one
        expected = weights[name] if head is None else head
        assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", None])
def test_a_broken_file_is_refused_before_anything_is_read(content: bytes | None, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2", tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match="safetensors"):
        load_part(path, ModelPart.LANGUAGE_MODEL, torch.float32)


def test_a_model_on_a_cpu_holds_a_descriptor_for_each_file_not_for_each_weight(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2", tmp_path / "model")
    before = psutil.Process().num_fds()
    model = load_part(path, ModelPart.LANGUAGE_MODEL, torch.float32)
    assert len(list(model.parameters())) > 20 >= psutil.Process().num_fds() - before + 18


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint16])
def test_a_weight_of_an_unusual_dtype_is_read_or_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2", tmp_path / "model")
    file = path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name] = (weights[name] * 100).abs().to(dtype)
    save_file(weights, file, metadata={"format": "pt"})
    if dtype == torch.uint16:
        with pytest.raises(ValueError, match=r"model\.safetensors: .* dtype U16"):
            load_part(path, ModelPart.LANGUAGE_MODEL, torch.float32)
        return
    model = load_part(path, ModelPart.LANGUAGE_MODEL, torch.float32)
    assert torch.equal(model.get_parameter(name), weights[name].float())


if __name__ == "__main__":
    print(json.dumps(_load(Path(sys.argv[1]), getattr(torch, sys.argv[2]))), flush=True)
    os._exit(0)  # the chip's thread runs on
