"""The overhead of a request, where a profile has it."""

from dataclasses import replace
from statistics import fmean

import msgspec
import pytest

from benchmarks.shapes import SHAREGPT_4O
from epd_serve.cost.profile import DecodeLine, Profile, Transport
from epd_serve.sim.device import Activity, MeasuredSharing
from epd_serve.sim.simulator import Fault, Outcome, SimDeployment, build, check_books, simulate
from epd_serve.sim.workloads import SimRequest
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


def test_steps_of_decodes_take_what_their_number_was_measured_to(ascend: Profile) -> None:
    lines = (DecodeLine(num_sequences=1, base_s=0.1, context_s=1e-3), DecodeLine(num_sequences=3, base_s=0.3))
    profile = msgspec.structs.replace(ascend, decode=lines)
    alone = SimRequest(at_s=0.0, images=(), num_text_tokens=12, num_output_tokens=4)
    (job,) = simulate(deployed("EPD", profile), [alone]).jobs
    assert job.first_token_s is not None and job.last_token_s is not None
    assert job.last_token_s - job.first_token_s == pytest.approx(0.3 + 1e-3 * (13 + 14 + 15))


def test_what_dies_while_images_are_prepared_leaves_nothing(slow: Profile) -> None:
    for name in ("e0", "p0", "d0"):
        faults = [Fault(at_s=at_s, instance=name, down_s=0.3) for at_s in (1.0, 2.0)]
        requests = SHAREGPT_4O.requests(40, 12.0, seed=4)
        outcome = simulate(deployed("2E-2P-2D", slow), requests, faults=faults)
        check_books(outcome)
        assert not any(job.failure for job in outcome.jobs)


def activity(stage: str, owner: str = "") -> Activity:
    return Activity(stage, 1, 1, 1, lambda: None, owner)


def test_stages_slow_each_other_down_as_measured(ascend: Profile) -> None:
    profile = msgspec.structs.replace(
        ascend, interference={"E/D": 0.5, "D/E": 0.25, "P/D": 0.1}, interference_within={"E/D": 1.0}
    )
    sharing = MeasuredSharing.of_profile(profile)

    def rates(*stages: tuple[str, str]) -> list[float]:
        return sharing.rates([activity(*stage) for stage in stages])

    assert rates(("E", "a")) == [1.0]
    assert rates(("E", "a"), ("D", "b")) == pytest.approx([1 / 1.5, 1 / 1.25])
    assert rates(("E", "a"), ("D", "a")) == pytest.approx([1 / 2, 1 / 1.25])
    assert rates(("E", "a"), ("P", "b")) == pytest.approx([1 / 1.5, 1 / 1.1])
    assert rates(("E", "a"), ("D", "a"), ("D", "b")) == pytest.approx([1 / 2.5, 1 / 1.25, 1 / 1.25])


def on_cpu(line: str, profile: Profile, requests: list[SimRequest]) -> Outcome:
    deployment = build(parse_topology(line), ["cpu"], lambda *_: profile, num_blocks=4096)
    return simulate(deployment, requests)


def ttft_s(outcome: Outcome) -> float:
    return fmean((job.first_token_s or 0.0) - job.sent_s for job in outcome.jobs)


def test_images_wait_for_the_thread_that_prepares_them(slow: Profile) -> None:
    """On a CPU with one thread; elsewhere the host has several."""
    at_once = [
        SimRequest(at_s=0.0, images=((f"{i}", 784 * 500),), num_text_tokens=9, num_output_tokens=3)
        for i in range(4)
    ]
    apart = [replace(one, at_s=10.0 * number) for number, one in enumerate(at_once)]
    long = msgspec.structs.replace(slow, image_s=1.0)
    waited_s = ttft_s(on_cpu("E-P-D", long, at_once)) - ttft_s(on_cpu("E-P-D", long, apart))
    assert waited_s == pytest.approx(1.5, rel=0.1)


def test_another_transport_is_used_where_it_was_measured(slow: Profile) -> None:
    far = Transport(handshake_s=0.001, bytes_per_s=1e8, feature_s=0.05, hand_over_s=0.1)
    known = msgspec.structs.replace(slow, transports={"mooncake": far})
    (near,), (job,) = (on_cpu("E-P-D", one, [REQUEST]).jobs for one in (slow, known.over("mooncake")))
    assert (job.first_token_s or 0.0) - (near.first_token_s or 0.0) > 0.05 - slow.feature_s - slow.split_s - 0.01
    assert (job.last_token_s or 0.0) - (job.first_token_s or 0.0) > 0.1
    with pytest.raises(ValueError, match="profile --rdma"):
        known.over("rdma")


def test_a_cpu_has_cores_for_all_but_those_in_parentheses(slow: Profile) -> None:
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    apart, together = (on_cpu(line, slow, requests) for line in ("E-P-D", "(E-P)-D"))
    assert len(apart.busy) == 3 and len(together.busy) == 2
    assert ttft_s(together) > ttft_s(apart)
