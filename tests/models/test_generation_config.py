"""generation_config.json decides what a request leaves open, as in vLLM, and nothing that it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from epd_serve.demo import weights_dir
from epd_serve.models.generation_config import read_generation_config
from epd_serve.protocol.openai.generation import ChatCompletionRequest
from epd_serve.types import SAMPLING_DEFAULTS, SamplingParams

#: None of them the APIs' own.
DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}
MODEL = LlamaConfig(eos_token_id=9)


def write(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def sampling(**fields: Any) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    return ChatCompletionRequest.parse(msgspec.json.encode(body)).sampling(1)


def test_all_that_a_request_leaves_open_is_the_models(tmp_path: Path) -> None:
    path = write(tmp_path, do_sample=True, max_new_tokens=7, transformers_version="5.0", **DEFAULTS)
    generation = read_generation_config(path, MODEL)
    assert generation.max_tokens == 7
    completed = generation.complete(sampling())
    assert {name: getattr(completed, name) for name in DEFAULTS} == DEFAULTS
    assert DEFAULTS.keys() == SAMPLING_DEFAULTS.keys()


def test_a_request_that_says_so_keeps_its_own(tmp_path: Path) -> None:
    """The APIs' default, too, once it is written into the request; null is as good as nothing."""
    generation = read_generation_config(write(tmp_path, **DEFAULTS), MODEL)
    for name in DEFAULTS:
        for value in (SAMPLING_DEFAULTS[name], 1):
            completed = generation.complete(sampling(**{name: value}))
            assert {other: getattr(completed, other) for other in DEFAULTS} == {**DEFAULTS, name: value}
        assert generation.complete(sampling(**{name: None})) == generation.complete(sampling())


def test_the_built_in_model_answers_greedily_unless_asked_otherwise() -> None:
    generation = read_generation_config(weights_dir(), MODEL)
    assert generation.complete(sampling()).temperature == 0
    assert generation.complete(sampling(temperature=1)).temperature == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_values_that_are_none_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"generation_config.json: {name} is "):
        read_generation_config(write(tmp_path, **{name: value}), MODEL)


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": ["</s>"]}'])
def test_files_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json: "):
        read_generation_config(tmp_path, MODEL)
