"""The time of an emulated device: that of the data sheet or of a measurement, without the host's part."""

import msgspec
import pytest

from device.datasheets import spec_of
from device.emulated.timeline import UNKNOWN
from epd_serve.cost.roofline import analytic_profile, emulated_profile
from epd_serve.cost.shape import shape_of


def test_steps_and_encodes_are_those_of_the_data_sheet_without_the_launch():
    sheet = spec_of("h200")
    with_host = analytic_profile(shape_of("qwen2.5-vl-7b"), sheet)
    profile = emulated_profile("qwen2.5-vl-7b", "h200")
    decode_s, demand = profile.step_demand(64, 64, 64_000, 0)
    assert decode_s == pytest.approx(with_host.step_s(64, 64, 64_000) - sheet.launch_s)
    assert demand.bandwidth == pytest.approx(0.8) and demand.compute < 0.3
    prefill_s, demand = profile.step_demand(2048, 1, 0, 2048**2)
    assert prefill_s == pytest.approx(with_host.step_s(2048, 1, 0, 2048**2) - sheet.launch_s)
    assert demand.compute == pytest.approx(0.85) and demand.bandwidth < 0.3
    encode_s, _ = profile.encode_demand([1 << 20, 1 << 18])
    assert encode_s == pytest.approx(with_host.encode_s([1 << 20, 1 << 18]) - sheet.launch_s)


def test_a_measured_profile_is_taken_as_it_was_measured(tmp_path):
    measured = msgspec.structs.replace(
        analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("h200")), kind="measured"
    )
    path = tmp_path / "measured.json"
    path.write_bytes(measured.to_json())
    profile = emulated_profile("qwen2.5-vl-7b", str(path))
    decode_s, demand = profile.step_demand(1, 1, 1000, 0)
    assert decode_s == measured.step_s(1, 1, 1000) and demand == UNKNOWN
    with pytest.raises(ValueError, match=r"is the profile of .*28 layers, but llava-1.5-7b has 32"):
        emulated_profile("llava-1.5-7b", str(path))


@pytest.mark.parametrize("size", [(112, 112), (6000, 4000), (640, 480)])
@pytest.mark.parametrize("model", ["qwen3-vl-8b", "qwen2.5-vl-7b", "llava-1.5-7b"])
def test_tokens_of_images_stay_within_the_bounds_of_the_processor(model: str, size: tuple[int, int]) -> None:
    shape = shape_of(model)
    assert shape.vision is not None
    expected = shape.vision.num_tokens(*size)
    tokens = analytic_profile(shape, spec_of("h200")).image_tokens(size[0] * size[1])
    assert tokens == pytest.approx(expected, rel=0.02)
