"""A model that would answer wrongly: no instance of any role becomes ready, and each says by which field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from safetensors.torch import load_file, save_file

from epd_serve.config import InstanceOptions
from epd_serve.instance.instance import Instance
from epd_serve.types import Role


def configure(path: Path, part: str, key: str, value: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config[part][key] = value
    (path / "config.json").write_text(json.dumps(config))


def of_few_tokens(path: Path) -> None:
    """As many as its configuration says, and fewer than its tokenizer has."""
    configure(path, "text_config", "vocab_size", 300)
    weights = load_file(path / "model.safetensors")
    weights = {
        name: weight[:300].clone() if "embed_tokens" in name else weight for name, weight in weights.items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("role", ["E", "PD"])
async def test_by_its_configuration(tmp_path: Path, role: str) -> None:
    with pytest.raises(ValueError, match=r"text_config.is_causal is False"):
        await started(tmp_path, role, lambda path: configure(path, "text_config", "is_causal", False))


async def test_by_its_vocabulary(tmp_path: Path) -> None:
    """One of the others would end the engine."""
    with pytest.raises(ValueError, match=r"vocab_size is 300, but the tokenizer has \d+ tokens"):
        await started(tmp_path, "PD", of_few_tokens)


async def test_by_pictures_larger_than_a_step(tmp_path: Path) -> None:
    """Their tokens see each other; those of the tiny model are nine."""
    with pytest.raises(ValueError, match=r"tokens is 8, but .* all 9 tokens .* set it to 9 or more"):
        await started(tmp_path, "PD", lambda path: None, kind="gemma3", max_num_batched_tokens=8)


async def test_by_a_state_larger_than_the_pool(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state of one sequence takes 26KiB, 26 of 8 KV blocks"):
        await started(tmp_path, "PD", lambda path: None, kind="qwen3_5", block_size=1)


async def started(
    path: Path, role: str, change: Callable[[Path], None], kind: str = "qwen2_5_vl", **others: Any
) -> None:
    model = tiny_models.make_tiny_model(kind, path / "model")
    change(model)
    options = InstanceOptions(
        name="one",
        role=Role.parse(role),
        model=model,
        served_model_name="tiny",
        dtype="float32",
        num_blocks=8,
        **others,
    )
    instance = Instance(options)
    try:
        await instance.start()
    finally:
        assert not instance.ready
        if hasattr(instance, "_transport"):
            instance.transport.close()
