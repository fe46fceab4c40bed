"""At its load, a tower is tried on pictures: it must make as many tokens as its family counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch

from device.registry import get_device
from epd_serve.models.families.internvl import InternVL
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("internvl", tmp_path_factory.mktemp("model") / "internvl")


def test_a_tower_that_pads_nothing_attends_by_the_device(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Tower(path, torch.float32, get_device("cpu"), family=load_family(path)).uses_device_attention
    assert caplog.text == ""


def test_other_tokens_than_are_counted_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InternVL, "num_tokens", lambda family, item: 3)
    with pytest.raises(ValueError, match=r"tokens of a picture of 200x50 pixels, where .* say 3"):
        Tower(path, torch.float32, get_device("cpu"), family=load_family(path))
