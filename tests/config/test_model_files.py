"""A model directory is refused with the name of the file that is wrong, before anything loads it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from epd_serve.config.model_files import check_model_files
from epd_serve.demo import weights_dir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights_dir(), tmp_path / "model"))


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda model: (file := model / "model.safetensors").write_bytes(change(file.read_bytes()))


def sharded(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_shards_with_their_index_are_taken(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_files(model)


def test_the_files_that_transformers_reads_are_looked_at_alone(model: Path) -> None:
    """The whole goes before an index, and Mistral's consolidated.safetensors is a copy of it."""
    counts = check_model_files(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert check_model_files(model) == counts
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        check_model_files(model)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
        (lambda model: (model / "config.json").write_text("{}", "utf-8-sig"), "config.json"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda model: (model / "chat_template.jinja").write_text("{{"), "chat template"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors"),
        (weights(lambda data: data[:-100]), "model.safetensors"),
        (weights(lambda data: data[:50]), "model.safetensors"),
        (weights(lambda _: b"version https://git-lfs.github.com/spec/v1\nsize 9\n"), "model.safetensors"),
        (sharded, "model-00002-of-00002.safetensors"),
    ],
)
def test_a_file_that_is_wrong_is_named(model: Path, spoil: Callable[[Path], object], named: str) -> None:
    spoil(model)
    with pytest.raises(ValueError, match=re.escape(named)):
        check_model_files(model)
