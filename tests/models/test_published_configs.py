"""Configurations as checkpoints are published with: their sizes, and the harmless fields that nothing reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_fused import FUSED
from published_generic import GENERIC

from epd_serve.models.checkpoint_config import read_config

PUBLISHED = FUSED | GENERIC


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published_pass(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    text = read_config(tmp_path).get_text_config()
    published = PUBLISHED[name].get("thinker_config", PUBLISHED[name])
    assert text.num_hidden_layers == published.get("text_config", published)["num_hidden_layers"]


def test_a_number_in_the_place_of_true_is_refused_by_its_field(tmp_path: Path) -> None:
    """As the file of Llama 4 Scout was saved, and as transformers takes it no more."""
    content = PUBLISHED["Llama-4-Scout-17B-16E"]
    content = {**content, "text_config": {**content["text_config"], "attn_temperature_tuning": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="'attn_temperature_tuning' expected bool, got int"):
        read_config(tmp_path)
