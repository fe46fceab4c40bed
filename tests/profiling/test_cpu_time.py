"""CPU time that instances take more over one transport than over another."""

from pathlib import Path

import pytest

from epd_serve.bench.run_directory import RunDirectory, RunWriter
from epd_serve.bench.types import Record, RunSettings, Sample
from epd_serve.profiling.overheads import Spent, talk_cpu_s


def spent(path: Path, num_tokens: int, cpu_s: float, num_images: int = 0) -> Spent:
    settings = RunSettings(base_url="", model="", workload="", num_requests=2, seed=0, arrivals="closed:1")
    run = RunDirectory.create(path, settings, [(0, None), (1, None)])
    with RunWriter(run) as writer:
        for phase, seconds in (("before", 1.0), ("after", 1.0 + cpu_s)):
            devices = {"cpu": {"cpu_s:e0": seconds / 2, "cpu_s:p0": seconds / 2, "cpu_s:proxy": 7 * seconds}}
            writer.sample(Sample(at_s=0.0, phase=phase, devices=devices))
    records = [
        Record(index=i, workload="", modality="text", scheduled_s=0.0, finish_s=1.0, num_prompt_tokens=num_tokens)
        for i in range(2)
    ]
    return Spent.on(run, records, num_images)


def test_what_talking_costs_is_told_by_request_token_and_image(tmp_path: Path) -> None:
    loads = ((10, 0), (100, 0), (100, 2))
    near = [spent(tmp_path / f"w{i}", tokens, 5.0, images) for i, (tokens, images) in enumerate(loads)]
    far = [
        spent(tmp_path / f"a{i}", tokens, 5.0 + 2 * 0.3 + 2 * 0.002 * tokens + 0.05 * images, images)
        for i, (tokens, images) in enumerate(loads)
    ]
    assert near[0].cpu_s == pytest.approx(5.0), "the gateway is none of the instances"
    assert talk_cpu_s(far, near) == pytest.approx((0.3, 0.002, 0.05))
    assert talk_cpu_s(near, far) == (0, 0, 0), "less than none is none"
