"""A profile of the demo model on this machine: small, but measured."""

import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from device.cpu import CpuDevice
from device.datasheets import DEVICE_SPECS
from epd_serve.cli.app import app
from epd_serve.config.schema import model_path
from epd_serve.cost.profile import DecodeLine, Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import KNOWN_SHAPES, shape_of
from epd_serve.engine.step import StepRunner
from epd_serve.profiling import device_profile, fits

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {
        "SIDES": (112, 224),
        "BATCHES": (1, 2),
        "CHUNKS": (16, 64, 128),
        "STARTS": (0, 64),
        "DECODES": (1, 8),
        "CONTEXTS": (32, 128),
        "MIXED": (2,),
        "MIXED_CONTEXT": 64,
        "MIXED_CHUNKS": (64,),
        "TRANSFERS": (1 << 12, 1 << 20),
        "STEADY_S": 0.01,
    }.items():
        monkeypatch.setattr(device_profile, name, values)


@pytest.mark.usefixtures("small_grid")
def test_the_command_measures_fits_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: WeakSet[StepRunner] = WeakSet()

    class Watched(StepRunner):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            runners.add(self)

    def headroom(_: CpuDevice) -> int:
        assert not runners, "the KV memory that was measured with is free for a deployment"
        return 1 << 30

    monkeypatch.setattr(device_profile, "StepRunner", Watched)
    monkeypatch.setattr(CpuDevice, "headroom", headroom)
    out = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["profile", str(out), "--model", "demo", "--threads", "1", "--clock", "cpu"])
    assert result.exit_code == 0, result.output
    assert f"Wrote {out}." in result.output and f"{{device: cpu, count: 1, profile: {out}}}" in result.output
    profile = Profile.read(out)
    assert (profile.kind, profile.device, profile.model, profile.dtype) == ("measured", "cpu", "demo", "float32")
    assert profile.software["torch"] == torch.__version__
    assert set(profile.residuals) == {"encode", "prefill", "mixed", "decode", "transfer"}
    assert [line.num_sequences for line in profile.decode] == [1, 8]
    assert len(profile.samples) == sum(one.num_samples for one in profile.residuals.values())
    shape = shape_of(str(model_path("demo")))
    assert profile.kv_token_bytes == shape.kv_token_bytes
    assert profile.num_layers == shape.language.num_layers
    assert profile.encode_s([224**2] * 2) > profile.encode_s([112**2]) > 0
    # the demo's processor brings images to one size, whatever they are
    assert profile.image_tokens(802 * 652) == profile.image_tokens(8 * 8) == 36
    assert profile.step_s(128, 1, 0, 128**2) > profile.step_s(1, 1, 64) > 0


def test_each_number_of_decodes_is_fitted_by_itself() -> None:
    """The first ones cost most: a straight line from 1 to 32 would have 4 of them 12 % too short."""
    known = {1: 0.0047, 4: 0.0068, 16: 0.0111, 32: 0.0145}
    samples: list[fits.Sample] = [
        ("decode", [size, size, size * context, 0], base_s + 1.6e-6 * size * context)
        for size, base_s in known.items()
        for context in (32, 256, 1024)
    ]
    lines = fits.decode_lines(samples)
    assert [line.num_sequences for line in lines] == list(known)
    analytic = analytic_profile(shape_of("llava-1.5-7b"), DEVICE_SPECS["a100"])
    profile = msgspec.structs.replace(analytic, decode=lines)
    for _, work, seconds in samples:
        assert profile.step_s(*work) == pytest.approx(seconds)
    assert profile.step_s(10, 10, 0) == pytest.approx((0.0068 + 0.0111) / 2), "between two sizes"
    assert profile.step_s(48, 48, 0) == pytest.approx(0.0145 + 0.0034), "beyond the largest"
    assert profile.step_s(10, 2, 0, 100) == analytic.step_s(10, 2, 0, 100), "a step with a prompt in it"
    falling = msgspec.structs.replace(analytic, decode=(lines[2], DecodeLine(num_sequences=32, base_s=0.009)))
    assert falling.step_s(1, 1, 0) == lines[2].base_s and falling.step_s(64, 64, 0) == 0.009


def test_an_invalid_profile_is_explained(tmp_path: Path) -> None:
    analytic = analytic_profile(shape_of("llava-1.5-7b"), DEVICE_SPECS["a100"])
    file = tmp_path / "profile.json"
    file.write_bytes(analytic.to_json())
    assert Profile.read(file) == analytic
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(ValueError, match="version 99, but this program reads 1"):
        Profile.read(file)
    file.write_text(json.dumps({**content, "speed": 1}))
    with pytest.raises(ValueError, match="make one with 'epd-serve profile'"):
        Profile.read(file)
    with pytest.raises(ValueError, match="No such file"):
        Profile.read(tmp_path / "nothing.json")


@pytest.mark.parametrize("device", DEVICE_SPECS)
def test_analytic_profiles_know_their_bottlenecks(device: str) -> None:
    """TriInfer, section 3.1: decode waits for memory, prefill and encode for arithmetic; TP divides both."""
    spec = DEVICE_SPECS[device]
    profile = analytic_profile(KNOWN_SHAPES["qwen2-vl-7b"], spec)
    compute, memory = profile.step
    assert memory.seconds(8, 8, 8 * 1024, 0) > compute.seconds(8, 8, 8 * 1024, 0)
    assert compute.seconds(2048, 1, 0, 2048**2) > memory.seconds(2048, 1, 0, 2048**2)
    compute_line, memory_line = profile.encode
    assert compute_line.seconds([1 << 20]) > memory_line.seconds([1 << 20])
    two = analytic_profile(KNOWN_SHAPES["qwen2-vl-7b"], spec, 2)
    assert profile.step_s(2048, 1, 0, 2048**2) / 2 < two.step_s(2048, 1, 0, 2048**2)
    assert two.num_blocks(16, share=1.0, holds_tower=True) > profile.num_blocks(16, share=1.0, holds_tower=True)


def test_shipped_profiles_can_be_read() -> None:
    shipped = sorted(RESULTS.glob("profile-*.json"))
    assert shipped
    for file in shipped:
        assert Profile.read(file).kind == "measured"
