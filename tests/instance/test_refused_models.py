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


def not_causal(path: Path) -> None:
    configure(path, "text_config", "is_causal", False)


@pytest.mark.parametrize(
    ("role", "kind", "change", "others", "message"),
    [
        ("E", "qwen2_5_vl", not_causal, {}, "text_config.is_causal is False"),
        ("PD", "qwen2_5_vl", not_causal, {}, "text_config.is_causal is False"),
        ("PD", "qwen2_5_vl", of_few_tokens, {}, r"vocab_size is 300, but the tokenizer has \d+ tokens"),
        # tokens of its pictures attend to each other, so that a step must take all nine of one
        ("PD", "gemma3", None, {"max_num_batched_tokens": 8}, "tokens is 8, but .* set it to 9 or more"),
        ("PD", "qwen3_5", None, {"block_size": 1}, "state of one sequence takes 26KiB, 26 of 8 KV blocks"),
    ],
    ids=range(5),
)
async def test_it_names_the_field(
    tmp_path: Path,
    role: str,
    kind: str,
    change: Callable[[Path], None] | None,
    others: dict[str, Any],
    message: str,
) -> None:
    model = tiny_models.make_tiny_model(kind, tmp_path / "model")
    if change is not None:
        change(model)
    parts: Any = {"served_model_name": "tiny", "dtype": "float32", "num_blocks": 8} | others
    instance = Instance(InstanceOptions(name="one", role=Role.parse(role), model=model, **parts))
    with pytest.raises(ValueError, match=message):
        await instance.start()
    assert not instance.ready
    if hasattr(instance, "transport"):
        instance.transport.close()
