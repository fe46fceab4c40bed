"""``model: {shape_of: NAME}`` in a deployment file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from device.datasheets import spec_of
from epd_serve.config import InstanceOptions, ShapeConfig, load_config, parse_config
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.instance.loading.model import open_device

EMULATED = "devices: [emulated:h200 x 3]"


def test_a_shape_is_a_model_without_files() -> None:
    config = parse_config(f"model: {{shape_of: qwen2.5-vl-7b}}\n{EMULATED}")
    assert config.model == ShapeConfig(shape_of="qwen2.5-vl-7b") and config.model_name == "qwen2.5-vl-7b"
    options = config.options_for(config.placement()[1], device="emulated:h200:1", port=1, threads=1)
    assert InstanceOptions.model_validate_json(options.to_json()).model == config.model
    with pytest.raises(ValueError, match="lacks weights"):
        _ = config.checkpoint


def test_a_measured_profile_is_a_device(tmp_path: Path) -> None:
    """Its path is relative to the deployment file; it is served with its own times and memory."""
    profile = analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("h20"))
    (tmp_path / "ours.json").write_bytes(msgspec.structs.replace(profile, kind="measured").to_json())
    (tmp_path / "deployment.yaml").write_text(
        "topology: P-D\nmodel: {shape_of: qwen2.5-vl-7b}\ndevices: ['emulated:ours.json x 2']"
    )
    config = load_config(tmp_path / "deployment.yaml")
    assert config.devices == tuple(f"emulated:{tmp_path}/ours.json:{index}" for index in range(2))
    options = config.options_for(config.placement()[1], device=config.devices[1], port=1, threads=1)
    device = open_device(options)
    assert device.name == "emulated:ours:1" and device.memory()[0] == profile.memory_bytes

    (tmp_path / "ours.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ours.json: .*'epd-serve profile'"):
        open_device(options)
    other = config.model_copy(update={"model": ShapeConfig(shape_of="llava-1.5-7b")})
    (tmp_path / "ours.json").write_bytes(profile.to_json())
    with pytest.raises(ValueError, match="has 32; make a profile of it"):
        other.options_for(config.placement()[1], device=config.devices[1], port=1, threads=1)
