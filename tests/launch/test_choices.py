"""What a deployment leaves open follows from the machine and the model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from device.present import Accelerators
from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.launch import choices
from epd_serve.launch.choices import choose_engine, choose_layout
from epd_serve.launch.vllm import process
from epd_serve.launch.vllm.installed import VllmFound

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
GPUS = "devices: [cuda:0, cuda:1]\ntopology: "


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The accelerators of this machine, by kind."""
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        choices, "accelerators", lambda kind: Accelerators(memory_bytes=(1 << 30,) * counts.get(kind, 0))
    )
    monkeypatch.setattr(choices, "torch_lacks", lambda kind: "")
    return counts


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that a vLLM that fits knows."""
    known = [ARCHITECTURE]
    found = VllmFound("0.33.0", "", mooncake=False, nixl=True, epd_serve=True, python="3.11", architectures=known)
    monkeypatch.setattr(process, "check_engines", lambda config: {sys.executable: found})
    return known


def config_of(folder: Path, text: str, model_type: str = "qwen2_5_vl") -> DeploymentConfig:
    content = {"model_type": model_type, "architectures": [ARCHITECTURE]}
    (folder / "config.json").write_text(json.dumps(content))
    return parse_config(f"model: {folder}\n{text}")


@pytest.mark.parametrize(
    ("gpus", "npus", "model_type", "text", "expected"),
    [
        (0, 0, "qwen2_5_vl", "", "E-P-D on cpu"),
        (0, 0, "llama", "", "P-D on cpu"),
        (4, 0, "qwen2_5_vl", "", "E-P-D on cuda:0 cuda:1 cuda:2 cuda:3"),
        (2, 0, "qwen2_5_vl", "devices: auto", "EP-D on cuda:0 cuda:1"),
        (0, 1, "qwen2_5_vl", "", "EPD on npu:0"),
        (1, 0, "llama", "", "PD on cuda:0"),
        (2, 0, "llama", "", "P-D on cuda:0 cuda:1"),
        (2, 0, "llama", "devices: [cpu]", "P-D on cpu"),
        (2, 0, "qwen2_5_vl", "topology: EPD", "EPD on cuda:0 cuda:1"),
    ],
)
def test_the_layout_follows_from_machine_and_model(
    gpus: int, npus: int, model_type: str, text: str, expected: str, here: dict[str, int], tmp_path: Path
) -> None:
    here |= {"cuda": gpus, "npu": npus}
    config, reason = choose_layout(config_of(tmp_path, text, model_type))
    assert f"{config.topology} on {' '.join(config.devices)}" == expected and reason
    assert choose_layout(config) == (config, ""), "what is named stays"


def test_gpus_that_this_torch_cannot_use_are_named(
    here: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here |= {"cuda": 1}
    monkeypatch.setattr(choices, "torch_lacks", lambda kind: "torch is built without CUDA")
    config, reason = choose_layout(config_of(tmp_path, "", "llama"))
    assert config.devices == ("cpu",) and "without CUDA" in reason


@pytest.mark.usefixtures("architectures")
@pytest.mark.parametrize(
    ("text", "engine", "why"),
    [
        (f"{GPUS}EP-D", "vllm", "vLLM 0.33.0 is installed here and knows the model"),
        (f"{GPUS}EP-D\nengine: native", "native", ""),
        (f"{GPUS}EP-D\nengine: vllm", "vllm", ""),
        ("devices: [cpu]\ntopology: EP-D", "native", "not for cpu"),
        ("devices: [cuda:0, cpu]\ntopology: EP-D", "native", "not for cpu"),
        (f"{GPUS}ED-P", "native", "ED: a vLLM instance"),
        (f"{GPUS}EPD\ninstances: {{image_budget_pixels: 5}}", "native", "image_budget_pixels .* has no effect"),
    ],
)
def test_gpus_get_the_vllm_that_knows_the_model(text: str, engine: str, why: str, tmp_path: Path) -> None:
    config, reason = choose_engine(config_of(tmp_path, text))
    assert config.engine == engine and re.search(why, reason), reason


def test_a_vllm_that_does_not_know_the_model_is_not_chosen(tmp_path: Path, architectures: list[str]) -> None:
    architectures.clear()
    config, reason = choose_engine(config_of(tmp_path, f"{GPUS}EPD"))
    assert config.engine == "native" and ARCHITECTURE in reason
