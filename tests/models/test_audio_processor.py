"""Tokens, frames and tower inputs of sounds equal those of transformers' processors; towers that pad."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from processors import processor_of
from sounds import tune
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from device.registry import get_device
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.prompt import MediaLayouts
from epd_serve.models.family import Family, sound
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower, TowerAttention
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import AudioFacts


@pytest.fixture(scope="module", params=tiny_models.AUDIO_KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def family(path: Path) -> Family:
    return load_family(path)


def check_sound(path: Path, family: Family, length: int) -> None:
    """Compare tokens and tower inputs of a sound of so many samples with the processor's."""
    assert family.audio is not None
    processor, tokenizer = processor_of(path), AutoTokenizer.from_pretrained(path)
    token, rate = tokenizer.convert_ids_to_tokens(family.token_ids["audio"]), family.audio.rate
    samples = tune(length, length / 16_000)[0] / np.float32(32768)
    item = MediaRef.of_audio(AudioFacts(length, rate, 1))
    asked: dict[str, Any] = {"text": [token], "audio": [samples], "sampling_rate": rate}
    made = processor(**asked, return_tensors="pt", add_special_tokens=False)
    assert MediaLayouts(family, tokenizer).of(item).ids == made["input_ids"][0].tolist(), length
    for name, values in family.audio.inputs(samples).items():
        torch.testing.assert_close(values, made[name], rtol=0, atol=0, check_dtype=False)


def test_tokens_and_inputs_of_any_length_equal_the_processors(path: Path, family: Family) -> None:
    assert family.audio is not None
    rng = random.Random(0)
    lengths = [480, 64_000, 63_999, *(rng.randrange(500, 64_000) for _ in range(9))]
    lengths += [321] if family.audio.max_seconds == 4 else [64_001, 130_000]
    for length in lengths:
        check_sound(path, family, length)


#: Other values of what a feature extractor's file says.
_SETTINGS: list[tuple[str, Any]] = [
    *[("hop_length", 320), ("n_fft", 800), ("sampling_rate", 32_000), ("padding_value", 0.5)],
    *[("padding_side", "left"), ("chunk_length", 8), ("feature_size", 8), ("dither", 0.1), ("do_normalize", True)],
    *[("return_attention_mask", False), ("n_window", 25), ("min_length", 20_000)],
    ("feature_extractor_type", "SpeechT5FeatureExtractor"),
]


@pytest.mark.parametrize(
    "path",
    [
        kind if kind in ("qwen2_audio", "gemma4") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in tiny_models.AUDIO_KINDS
    ],
    indirect=True,
)
def test_a_setting_of_the_extractor_is_honoured_or_refused(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.unlink()
    for name, value in _SETTINGS:
        file.write_text(json.dumps({**settings, name: value}))
        try:
            family = load_family(tmp_path)
        except ValueError as error:
            assert name in str(error) or str(value) in str(error)
            continue
        for length in (4_000, 9_111, 25_000):
            check_sound(tmp_path, family, length)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.015, "too short for a token"), (4.001, "at most 4 s at a time")]
)
def test_sounds_that_are_too_short_or_long_are_refused(family: Family, seconds: float, words: str) -> None:
    assert family.audio is not None
    if family.audio.max_seconds > 4:  # takes any length
        assert family.num_tokens(sound(4.001, 48_000)) > family.num_tokens(sound(0.1, 48_000))
        return
    with pytest.raises(InvalidRequest, match=words):
        family.num_tokens(sound(seconds, 48_000))


def features_of(path: Path, inputs: dict[str, Any]) -> torch.Tensor:
    """By transformers' own model, attention in plain torch."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    owner = next((one for one in (model, model.model) if hasattr(one, "get_audio_features")), None)
    if owner is not None:
        with torch.inference_mode():
            output = owner.eval().get_audio_features(**inputs, return_dict=True)
            made: torch.Tensor = output.pooler_output
            return made if (mask := getattr(output, "attention_mask", None)) is None else made[mask]
    kept: list[torch.Tensor] = []
    model.eval().model.multi_modal_projector.register_forward_hook(lambda *given: kept.append(given[2]))
    mask = inputs["feature_attention_mask"]
    count = int(((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1)
    ids = torch.tensor([[1, *[model.config.audio_token_id] * count, 1]])
    with torch.inference_mode():
        model(input_ids=ids, **inputs)
    return kept[0][0, :count]


def test_padding_changes_no_feature(path: Path, family: Family, caplog: pytest.LogCaptureFixture) -> None:
    assert family.audio is not None
    batch = [family.audio.inputs(tune(n, n / 5)[0] / np.float32(32768)) for n in (3, 20, 9)]
    tower = Tower(path, torch.float32, get_device("cpu"), family=family)
    assert tower.uses_device_attention and caplog.text == ""
    for inputs, feature in zip(batch, tower.encode(batch), strict=True):
        expected = features_of(path, inputs)
        levels = feature[:, expected.shape[1] :]  # of pictures, which layers of the language model add
        torch.testing.assert_close(feature[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)
        assert not levels.any()


def test_an_attention_that_sees_padding_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial at the start finds it, and torch attends."""
    path = tiny_models.make_tiny_model("qwen2_audio", tmp_path / "model")
    family = load_family(path)
    assert family.audio is not None
    attend = TowerAttention.__call__

    def blind(self: TowerAttention, *given: Any, **named: Any) -> Any:
        return attend(self, *given[:4], scaling=named.get("scaling"))

    monkeypatch.setattr(TowerAttention, "__call__", blind)
    inputs = family.audio.inputs(tune(1, 1.1)[0] / np.float32(32768))
    expected = features_of(path, inputs)
    untried = Tower(path, torch.float32, get_device("cpu")).encode([inputs])[0]
    assert not torch.allclose(untried, expected, rtol=1e-2, atol=1e-2), "padding says nothing"
    tower = Tower(path, torch.float32, get_device("cpu"), family=family)
    assert not tower.uses_device_attention and "the tower uses torch's attention" in caplog.text
    torch.testing.assert_close(tower.encode([inputs])[0], expected, rtol=1e-4, atol=1e-4)
