"""What requests take besides their stages, measured on real deployments of the demo model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.bench.run_directory import RunDirectory, RunWriter
from epd_serve.bench.types import Record, RunSettings, Sample, Segment
from epd_serve.cost.profile import Profile
from epd_serve.launch import overheads
from epd_serve.launch.host_time import Answers, fit, host_times, split_times
from epd_serve.launch.overheads import OverheadOptions, with_overheads

DEMO = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-demo-cpu.json"


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "synthetic,text_tokens=10,image_share=0,output_tokens=256"
    for name, value in {"SIDES": (32, 128), "TOGETHER": (2,), "_STREAMS": (text, 20), "_IDLE_S": 0.1}.items():
        monkeypatch.setattr(overheads, name, value)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of all measurements, with the deployment that was asked."""
    found: list[tuple[str, int]] = []
    settings = overheads.RunSettings

    def noted(**fields: Any) -> Any:
        found.append((fields["base_url"], fields["seed"]))
        return settings(**fields)

    monkeypatch.setattr(overheads, "RunSettings", noted)
    return found


@pytest.mark.usefixtures("little")
@pytest.mark.timeout(900)  # a dozen processes that import what they need
def test_deployments_are_measured_and_nothing_of_the_stages_is_changed(seeds: list[tuple[str, int]]) -> None:
    told: list[str] = []
    stages = Profile.read(DEMO)
    options = OverheadOptions(model="demo", device="cpu", dtype="float32", threads=1, num_requests=1)
    found = with_overheads(stages, options, told.append)
    assert (found.step, found.encode, found.samples) == (stages.step, stages.encode, stages.samples)
    seconds = (
        *(found.request_s, found.image_s, found.image_pixel_s, found.split_s, found.split_token_s),
        *(found.feature_s, found.hand_over_s, found.loop_s, found.stream_s),
    )
    assert all(0 <= one < 10 for one in seconds) and any(seconds)
    cpu_s = (*msgspec.structs.astuple(found.host), *msgspec.structs.astuple(found.client), found.split_cpu_s)
    assert all(0 <= one < 10 for one in cpu_s) and found.client.token_s + found.client.request_s > 0
    assert 0 <= found.idle_cores < 8 and not found.transports
    assert {text.partition(":")[0] for text in told} == {"EPD", "E-P-D"}
    assert msgspec.json.decode(found.to_json(), type=Profile) == found
    assert len(seeds) == len(set(seeds)) > 10, "a picture that is there already tells nothing of an encode"


def run_of(tmp_path: Path, tokens: int, cpu_s: float, *, detail: str = "") -> RunDirectory:
    settings = RunSettings(base_url="", model="", workload="", num_requests=2, seed=0, arrivals="closed:1")
    run = RunDirectory.create(tmp_path / f"{tokens}{detail}", settings, [(0, None), (1, None)])
    with RunWriter(run) as writer:
        for index in range(2):
            times = [1.0 + 0.1 * i for i in range(tokens)]
            record = Record(
                index=index,
                workload="",
                modality="text",
                scheduled_s=0.0,
                finish_s=9.0,
                num_prompt_tokens=100,
                num_output_tokens=tokens,
                token_times_s=times,
                detail=detail,
            )
            writer.record(record)
        for phase, seconds in (("before", 1.0), ("after", 1.0 + cpu_s)):
            devices = {"cpu": {"cpu_s:e0": 2 * seconds, "cpu_s:proxy": seconds, "utilisation": 0.5}}
            writer.sample(Sample(at_s=0.0, phase=phase, devices=devices))
        writer.segment(Segment(segment=0, started_unix_s=0.0, plan_offset_s=0.0, wall_s=100.0, cpu_s=0.5))
    return run


def test_cpu_time_is_told_by_process(tmp_path: Path) -> None:
    loads = ((11, 2.3), (21, 4.3), (41, 8.4))
    answers = [Answers.of(run_of(tmp_path, tokens, cpu_s), 0) for tokens, cpu_s in loads]
    assert [one.gateway_s for one in answers] == pytest.approx([2.3, 4.3, 8.4])
    assert [one.instances_s for one in answers] == pytest.approx([4.6, 8.6, 16.8])
    host, client = host_times(answers)
    assert host.token_s == pytest.approx(0.1, rel=0.03)
    assert client.token_s == pytest.approx(0, abs=1e-6)
    request_s, token_s, image_s = split_times(answers[1:], answers[:2])
    assert 2 * request_s + 200 * token_s == pytest.approx((4.0 + 8.2) / 2) and image_s == 0
    with pytest.raises(ValueError, match="broken"):
        Answers.of(run_of(tmp_path, 2, 0.0, detail="broken"), 0)


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_a_fit_finds_what_made_the_values(parts: list[float]) -> None:
    rows = [[1.0, 2.0, 0.0], [3.0, 1.0, 5.0], [2.0, 2.0, 2.0], [7.0, 0.0, 1.0]]
    values = [sum(part * one for part, one in zip(parts, row, strict=True)) for row in rows]
    assert fit(rows, values) == pytest.approx(parts, abs=1e-6)
    assert min(fit(rows, [-one for one in values])) >= 0
