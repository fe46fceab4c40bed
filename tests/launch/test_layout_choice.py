"""What a deployment leaves open follows from the machine and the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device.present import Accelerators
from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.launch import layout_choice
from epd_serve.launch.layout_choice import choose_layout


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The accelerators of this machine, by kind."""
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        layout_choice, "accelerators", lambda kind: Accelerators(memory_bytes=(1 << 30,) * counts.get(kind, 0))
    )
    monkeypatch.setattr(layout_choice, "torch_lacks", lambda kind: "")
    return counts


def model(path: Path, model_type: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


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
def test_what_is_left_open_follows_from_machine_and_model(
    gpus: int, npus: int, model_type: str, text: str, expected: str, here: dict[str, int], tmp_path: Path
) -> None:
    here |= {"cuda": gpus, "npu": npus}
    path = model(tmp_path / "model", model_type)
    config, reason = choose_layout(parse_config(f"model: {path}\n{text}"))
    assert f"{config.topology} on {' '.join(config.devices)}" == expected and reason
    assert choose_layout(config) == (config, ""), "what is named stays"


def test_gpus_that_this_torch_cannot_use_are_named(
    here: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here |= {"cuda": 1}
    monkeypatch.setattr(layout_choice, "torch_lacks", lambda kind: "torch is built without CUDA")
    config, reason = choose_layout(parse_config(f"model: {model(tmp_path / 'model', 'llama')}"))
    assert config.devices == ("cpu",) and "GPU" in reason and "without CUDA" in reason


def test_a_topology_that_needs_more_devices_is_refused(here: dict[str, int], tmp_path: Path) -> None:
    here |= {"cuda": 1}
    with pytest.raises(ValueError, match="devices: auto"):
        choose_layout(parse_config(f"model: {model(tmp_path / 'model', 'llama')}\ntopology: P-D"))


def test_the_built_in_model_stays_on_the_cpu(here: dict[str, int]) -> None:
    here |= {"cuda": 8}
    assert choose_layout(DeploymentConfig()).config.devices == ("cpu",)
