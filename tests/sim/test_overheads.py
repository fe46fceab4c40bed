"""What a request takes besides its stages, where a profile has it."""

import msgspec
import pytest

from epd_serve.cost.profile import Profile
from epd_serve.sim.build import build
from epd_serve.sim.device import Activity, MeasuredSharing
from epd_serve.sim.request import SimRequest
from epd_serve.sim.simulator import Fault, SimDeployment, check_books, simulate
from epd_serve.sim.workloads import SHAREGPT_4O
from epd_serve.topology import parse_topology

REQUEST = SimRequest(at_s=1.0, images=(("cat", 784 * 500),), num_text_tokens=12, num_output_tokens=3)


@pytest.fixture
def slow(ascend: Profile) -> Profile:
    return msgspec.structs.replace(
        ascend,
        request_s=0.01,
        image_s=0.02,
        image_pixel_s=1e-7,
        split_s=0.001,
        split_token_s=1e-5,
        feature_s=0.004,
        hand_over_s=0.006,
        loop_s=0.0005,
        stream_s=0.0002,
    )


def deployed(line: str, profile: Profile) -> SimDeployment:
    topology = parse_topology(line)
    return build(topology, [f"npu:{i}" for i in range(topology.num_devices)], lambda *_: profile)


def test_a_request_alone_takes_what_was_measured_besides(ascend: Profile, slow: Profile) -> None:
    def times(line: str, profile: Profile) -> tuple[float, float]:
        (job,) = simulate(deployed(line, profile), [REQUEST]).jobs
        assert job.first_token_s is not None and job.last_token_s is not None
        return job.first_token_s, job.last_token_s - job.first_token_s

    prepare_s = 0.02 + 1e-7 * 784 * 500
    first, rest = (a - b for a, b in zip(times("EPD", slow), times("EPD", ascend), strict=True))
    assert first == pytest.approx(0.01 + prepare_s)
    assert rest == pytest.approx(2 * 0.0007)
    first, rest = (a - b for a, b in zip(times("E-P-D", slow), times("E-P-D", ascend), strict=True))
    # the reservation is made while the image is prepared
    assert first == pytest.approx(0.01 + prepare_s + 0.004 + 1e-5 * 512)
    assert rest == pytest.approx(0.006 + 2 * 0.0007)


def test_what_dies_while_images_are_prepared_leaves_nothing(slow: Profile) -> None:
    for name in ("e0", "p0", "d0"):
        faults = [Fault(at_s=at_s, instance=name, down_s=0.3) for at_s in (1.0, 2.0)]
        requests = SHAREGPT_4O.requests(40, 12.0, seed=4)
        outcome = simulate(deployed("2E-2P-2D", slow), requests, faults=faults)
        check_books(outcome)
        assert not any(job.failure for job in outcome.jobs)


def test_stages_slow_each_other_down_as_measured(ascend: Profile) -> None:
    profile = msgspec.structs.replace(
        ascend, interference={"E/D": 0.5, "D/E": 0.25, "P/D": 0.1}, interference_within={"E/D": 1.0}, crowding=0.2
    )
    sharing = MeasuredSharing.of_profile(profile, cores=2)

    def rates(*stages: tuple[str, str]) -> list[float]:
        return sharing.rates([Activity(stage, 1, 1, 1, lambda: None, owner=owner) for stage, owner in stages])

    assert rates(("E", "a")) == [1.0]
    assert rates(("E", "a"), ("D", "b")) == pytest.approx([1 / 1.5, 1 / 1.25])
    assert rates(("E", "a"), ("D", "a")) == pytest.approx([1 / 2, 1 / 1.25])
    assert rates(("E", "a"), ("P", "b")) == pytest.approx([1 / 1.5, 1 / 1.1])
    assert rates(*[("D", name) for name in "abc"]) == pytest.approx([2 / 3 / 1.2] * 3)
    # what too few cores do was measured with what the stages do to each other
    assert rates(("E", "a"), ("D", "a"), ("D", "b")) == pytest.approx([1 / 2.5, 2 / 3 / 1.2, 2 / 3 / 1.2])


def test_a_cpu_prepares_beside_what_it_computes(slow: Profile) -> None:
    """On one core, images that are prepared and what computes share it; a device leaves that to its host."""
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    topology = parse_topology("E-P-D")

    def ttft_s(devices: list[str], cores: float | None) -> float:
        deployment = build(topology, devices, lambda *_: slow, cores=cores, threads=1, num_blocks=4096)
        jobs = simulate(deployment, requests).jobs
        return sum((job.first_token_s or 0.0) - job.sent_s for job in jobs) / len(jobs)

    assert ttft_s(["cpu"], 1.0) > ttft_s(["cpu"], 64.0)
