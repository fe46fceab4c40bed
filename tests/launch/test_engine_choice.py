"""The engine of a deployment whose file names none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.launch import engine_choice
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.vllm.installed import VllmFound

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen2.5-VL-7B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "architectures": [ARCHITECTURE]}))
    return folder


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that a vLLM that fits knows."""
    known = [ARCHITECTURE]
    found = VllmFound("0.33.0", "", mooncake=False, nixl=True, epd_serve=True, python="3.11", architectures=known)
    monkeypatch.setattr(engine_choice, "check_engines", lambda config: {sys.executable: found})
    return known


def chosen(text: str, model: Path) -> tuple[str, str]:
    config, reason = choose_engine(parse_config(f"model: {model}\n{text}"))
    return config.engine, reason


def test_a_file_that_names_an_engine_keeps_it(model: Path) -> None:
    for engine in ("native", "vllm"):
        assert chosen(f"engine: {engine}\ndevices: [cuda:0, cuda:1]\ntopology: EP-D", model) == (engine, "")


def test_what_only_vllm_can_share_out_is_refused_where_the_engine_is_native(model: Path) -> None:
    with pytest.raises(ValueError, match="@tp2 needs engine: vllm"):
        chosen("topology: EP-D@tp2", model)


@pytest.mark.usefixtures("architectures")
def test_gpus_get_the_vllm_that_knows_the_model(model: Path) -> None:
    engine, reason = chosen("devices: [cuda:0, cuda:1]\ntopology: EP-D", model)
    assert (engine, reason) == ("vllm", "vLLM 0.33.0 is installed here and knows the model")


@pytest.mark.usefixtures("architectures")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("devices: [cpu]\ntopology: EP-D", "the devices are cpu"),
        ("devices: [cuda:0, cpu]\ntopology: EP-D", "the devices are cpu"),
        ("devices: [cuda:0, cuda:1]\ntopology: ED-P", "ED: a vLLM instance"),
        (
            "devices: [cuda:0]\ntopology: EPD\ninstances: {lease_s: 5}",
            "lease_s .* has no effect with engine: vllm",
        ),
    ],
)
def test_all_else_gets_the_native_engine(text: str, why: str, model: Path) -> None:
    engine, reason = chosen(text, model)
    assert engine == "native" and re.search(why, reason), reason


def test_a_vllm_that_does_not_know_the_model_is_not_chosen(model: Path, architectures: list[str]) -> None:
    architectures.clear()
    engine, reason = chosen("devices: [cuda:0]\ntopology: EPD", model)
    assert (engine, reason) == ("native", f"the vLLM that is installed here does not know {ARCHITECTURE}")


def test_the_built_in_model_is_native() -> None:
    config, reason = choose_engine(DeploymentConfig(devices=["cuda:0"], topology="EPD"))
    assert config.engine == "native" and "built-in" in reason


def test_without_vllm_the_reason_says_so(model: Path) -> None:
    engine, reason = chosen("devices: [cuda:0]\ntopology: EPD", model)
    assert engine == "native" and "has no vLLM" in reason
