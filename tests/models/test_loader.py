"""Partial loading: each stage holds its own weights and no others, and a missing weight is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from epd_serve.models.family import load_family
from epd_serve.models.loader import ModelPart, load_part, media_fingerprint, num_parameters


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


@pytest.mark.parametrize("part", ModelPart)
def test_a_missing_weight_is_an_error(tmp_path: Path, part: ModelPart) -> None:
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    wanted = "visual.blocks.0" if part is ModelPart.TOWER else "language_model.layers.0"
    victim = next(name for name in weights if wanted in name)
    del weights[victim]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights"):
        load_part(path, part, torch.float32)


@pytest.mark.parametrize("size", [(448, 448), (50, 200), (1000, 30)])
def test_pixels_are_counted_as_the_tower_sees_them(tiny_model: Path, size: tuple[int, int]) -> None:
    family = load_family(tiny_model)
    values = family.preprocess(Image.new("RGB", size))["pixel_values"]
    frames = getattr(family.config.vision_config, "temporal_patch_size", 1)  # a picture is all of them
    assert family.num_pixels(size) == values.numel() // 3 // frames


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="image-text-to-text"):
        load_part(tmp_path, ModelPart.LANGUAGE_MODEL, torch.float32)
    with pytest.raises(ValueError, match="does not know the family 'llama'"):
        load_family(tmp_path)


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


RSS_OF_PARTS = """
import sys, torch, psutil
from pathlib import Path
from epd_serve.models.loader import ModelPart, load_part
import epd_serve.models.family
models = []
for part in (ModelPart.TOWER, ModelPart.LANGUAGE_MODEL):
    before = psutil.Process().memory_info().rss
    models.append(load_part(Path(sys.argv[1]), part, torch.float32))
    sum(float(parameter.sum()) for parameter in models[-1].parameters())  # mapped: memory once they are read
    print((psutil.Process().memory_info().rss - before) >> 20)
"""


def test_resident_memory_follows_the_part(tmp_path: Path) -> None:
    """The language model of this one is 175 MB of float32, its tower less than 2 MB."""
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model", intermediate_size=22000)
    command = [sys.executable, "-W", "ignore", "-c", RSS_OF_PARTS, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    tower, language_model = map(int, output.stdout.split())
    assert language_model > 150
    assert tower < 75
