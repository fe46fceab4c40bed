"""At its load, a tower is tried on pictures: where the device's attention is wrong, torch's takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from pictures import noise
from transformers import AutoModelForImageTextToText

from device.registry import get_device
from epd_serve.models.families.idefics3 import Idefics3
from epd_serve.models.family import Size, TowerInputs
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("idefics3", tmp_path_factory.mktemp("model") / "idefics3")


class Padded(Idefics3):
    """One tile for each picture, half of which is padding that a mask names."""

    input_names = ("pixel_values", "pixel_attention_mask")

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        batch = self.processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        inputs = {name: batch[name][:, :1].clone() for name in self.input_names}
        for tensor in inputs.values():
            tensor[..., 28:] = 0
        return inputs

    def parts(self, size: Size) -> Sequence[int | str]:
        return (self._tile_tokens,)


def test_a_tower_that_pads_attends_by_torch(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = load_family(path)
    family = Padded(known.config, known.processor)
    device = get_device("cpu")
    inputs = family.preprocess(np.array(noise(1, (90, 60))))
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.get_image_features(**inputs, return_dict=True).pooler_output[0]
    untried = Tower(path, torch.float32, device)
    assert not torch.allclose(untried.encode([inputs])[0], expected, rtol=1e-2, atol=1e-2), "padding says nothing"
    tower = Tower(path, torch.float32, device, family=family)
    assert not tower.uses_device_attention
    assert "the tower attends by torch" in caplog.text
    torch.testing.assert_close(tower.encode([inputs])[0], expected, rtol=1e-4, atol=1e-4)


def test_a_tower_that_pads_nothing_attends_by_the_device(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Tower(path, torch.float32, get_device("cpu"), family=load_family(path)).uses_device_attention
    assert caplog.text == ""


def test_other_tokens_than_are_counted_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Idefics3, "num_tokens", lambda family, item: 3)
    with pytest.raises(ValueError, match=r"tokens of a picture of 200x50 pixels, where .* say 3"):
        Tower(path, torch.float32, get_device("cpu"), family=load_family(path))
