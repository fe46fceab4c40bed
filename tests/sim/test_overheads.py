"""The overhead of a request, where a profile has it."""

from dataclasses import replace
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.cost.profile import DecodeLine, Profile, Transport
from epd_serve.sim.device import Activity, MeasuredSharing
from epd_serve.sim.simulator import Fault, Outcome, SimDeployment, build, check_books, simulate
from epd_serve.sim.workloads import SHAREGPT_4O, SimRequest
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


def activity(stage: str, owner: str = "", cores: float = 1.0) -> Activity:
    return Activity(stage, 1, 1, 1, lambda: None, cores, owner)


def test_stages_slow_each_other_down_as_measured(ascend: Profile) -> None:
    profile = msgspec.structs.replace(
        ascend,
        interference={"E/D": 0.5, "D/E": 0.25, "P/D": 0.1},
        interference_within={"E/D": 1.0, "D/host": 0.2},
        crowding=0.2,
    )
    sharing = MeasuredSharing.of_profile(profile, cores=2)

    def rates(*stages: tuple[str, str]) -> list[float]:
        return sharing.rates([activity(*stage) for stage in stages])

    assert rates(("E", "a")) == [1.0]
    assert rates(("E", "a"), ("D", "b")) == pytest.approx([1 / 1.5, 1 / 1.25])
    assert rates(("E", "a"), ("D", "a")) == pytest.approx([1 / 2 / 1.5, 1 / 1.25])
    assert rates(("E", "a"), ("P", "b")) == pytest.approx([1 / 1.5, 1 / 1.1])
    assert rates(("D", "a"), ("host", "a")) == pytest.approx([1 / 1.2, 1])
    assert rates(("D", "a"), ("host", "b")) == pytest.approx([1, 1])
    assert rates(*[("D", name) for name in "abc"]) == pytest.approx([2 / 3 / 1.2] * 3)
    device = MeasuredSharing.of_profile(profile)
    assert device.rates([activity("E", "a"), activity("D", "a")]) == pytest.approx([1 / 2, 1 / 1.25])
    # what too few cores do was measured with what the stages do to each other
    assert rates(("E", "a"), ("D", "b"), ("D", "c")) == pytest.approx([1 / 2, 2 / 3 / 1.2, 2 / 3 / 1.2])


def test_a_stage_that_waits_within_its_process_leaves_its_core_to_others(ascend: Profile) -> None:
    sharing = MeasuredSharing.of_profile(
        msgspec.structs.replace(ascend, interference_within={"E/P": 1.0, "P/E": 1.0}), cores=2
    )
    together, apart = (
        sharing.rates([activity("E", "a"), activity("P", owner), activity("D", "d")]) for owner in ("a", "p")
    )
    assert together == pytest.approx([0.5, 0.5, 1.0])
    assert apart == pytest.approx([2 / 3] * 3)


def test_cores_go_in_equal_parts_to_instances_where_the_kernel_groups_their_threads(ascend: Profile) -> None:
    known = msgspec.structs.replace(ascend, crowding=0.2, crowding_within=0.1)
    by_thread, by_instance = (
        MeasuredSharing.of_profile(msgspec.structs.replace(known, cores_go_by=sharer), cores=2)
        for sharer in ("thread", "instance")
    )
    apart = [activity("E", "e"), activity("P", "p"), activity("D", "d")]
    joined = [activity("E", "ep"), activity("P", "ep"), activity("D", "d")]
    assert by_instance.rates(apart) == pytest.approx(by_thread.rates(apart))
    assert by_thread.rates(apart) == pytest.approx([2 / 3 / 1.2] * 3)
    assert by_thread.rates(joined) == pytest.approx([2 / 3 / 1.2] * 3)
    assert by_instance.rates(joined) == pytest.approx([1 / 2 / 1.1, 1 / 2 / 1.1, 1])
    alone = [activity("E", "epd"), activity("D", "epd"), activity("host", "epd")]
    assert by_instance.rates(alone) == pytest.approx([2 / 3 / 1.2] * 3)
    # what one does not ask for is left to the others
    little = [activity("host", "h", 0.5), activity("E", "e"), activity("D", "d")]
    assert by_instance.rates(little) == pytest.approx([1, 3 / 4 / 1.2, 3 / 4 / 1.2])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 8)), min_size=1, max_size=6), st.floats(1, 16))
def test_no_core_is_given_out_twice_and_none_is_left_that_is_asked_for(
    wanted: list[tuple[str, float]], cores: float
) -> None:
    sharing = MeasuredSharing(cores=cores, by_instance=True)
    activities = [activity("E", owner, count) for owner, count in wanted]
    used = sum(rate * one.cores for rate, one in zip(sharing.rates(activities), activities, strict=True))
    assert used == pytest.approx(min(sum(count for _, count in wanted), cores))


def on_cpu(line: str, profile: Profile, requests: list[SimRequest], cores: float = 2.0) -> Outcome:
    deployment = build(parse_topology(line), ["cpu"], lambda *_: profile, cores=cores, threads=1, num_blocks=4096)
    return simulate(deployment, requests)


def tpot_s(outcome: Outcome) -> float:
    return fmean(
        ((job.last_token_s or 0.0) - (job.first_token_s or 0.0)) / (job.num_output - 1) for job in outcome.jobs
    )


def ttft_s(outcome: Outcome) -> float:
    return fmean((job.first_token_s or 0.0) - job.sent_s for job in outcome.jobs)


def test_decode_has_more_of_a_core_beside_one_instance_than_beside_two(slow: Profile) -> None:
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    by_instance = msgspec.structs.replace(slow, cores_go_by="instance")
    (joined, apart), (joined_before, apart_before) = (
        [tpot_s(on_cpu(line, one, requests)) for line in ("EP-D", "E-P-D")] for one in (by_instance, slow)
    )
    assert joined < 0.9 * apart and joined < 0.9 * joined_before
    assert joined_before == pytest.approx(apart_before, rel=0.1)


def test_what_instances_that_talk_compute_takes_cores_from_stages(slow: Profile) -> None:
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    busy = msgspec.structs.replace(slow, split_cpu_s=0.05, feature_cpu_s=0.05, split_token_cpu_s=1e-4)
    quiet, crowded = (on_cpu("E-P-D", one, requests, 1.0) for one in (slow, busy))
    check_books(crowded)
    assert ttft_s(crowded) > 1.1 * ttft_s(quiet) and tpot_s(crowded) > 1.1 * tpot_s(quiet)
    quiet, crowded = (on_cpu("E-P-D", one, requests, 64.0) for one in (slow, busy))
    assert (ttft_s(crowded), tpot_s(crowded)) == pytest.approx((ttft_s(quiet), tpot_s(quiet)))


def test_images_wait_for_the_thread_that_prepares_them(slow: Profile) -> None:
    """On a CPU with one thread; elsewhere the host has several."""
    at_once = [
        SimRequest(at_s=0.0, images=((f"{i}", 784 * 500),), num_text_tokens=9, num_output_tokens=3)
        for i in range(4)
    ]
    apart = [replace(one, at_s=10.0 * number) for number, one in enumerate(at_once)]
    long = msgspec.structs.replace(slow, image_s=1.0)
    waited_s = ttft_s(on_cpu("E-P-D", long, at_once, 64.0)) - ttft_s(on_cpu("E-P-D", long, apart, 64.0))
    assert waited_s == pytest.approx(1.5, rel=0.1)


def test_another_transport_is_used_where_it_was_measured(slow: Profile) -> None:
    far = Transport(handshake_s=0.001, bytes_per_s=1e8, feature_s=0.05, hand_over_s=0.1)
    known = msgspec.structs.replace(slow, transports={"mooncake": far})
    (near,), (job,) = (on_cpu("E-P-D", one, [REQUEST]).jobs for one in (slow, known.over("mooncake")))
    assert (job.first_token_s or 0.0) - (near.first_token_s or 0.0) > 0.05 - slow.feature_s - slow.split_s - 0.01
    assert (job.last_token_s or 0.0) - (job.first_token_s or 0.0) > 0.1
    with pytest.raises(ValueError, match="profile --rdma"):
        known.over("rdma")


def test_a_cpu_prepares_beside_what_it_computes(slow: Profile) -> None:
    """On one core, images that are prepared and what computes share it; a device leaves that to its host."""
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    assert ttft_s(on_cpu("E-P-D", slow, requests, 1.0)) > ttft_s(on_cpu("E-P-D", slow, requests, 64.0))
