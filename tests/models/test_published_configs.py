"""Configurations as checkpoints are published with: their sizes, and the harmless fields that nothing reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.models.checkpoint_config import read_config

#: One config.json a line.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published_pass(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    text = read_config(tmp_path).get_text_config()
    published = PUBLISHED[name].get("thinker_config", PUBLISHED[name])
    assert text.num_hidden_layers == published.get("text_config", published)["num_hidden_layers"]
