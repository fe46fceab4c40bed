"""The simulator against arithmetic, and against itself."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_load import SHAREGPT_4O, TEXT, VISUAL_WEB_INSTRUCT, check_books, load

from device.emulated.timeline import Demand, Running, advance
from epd_serve.cost.profile import DecodeLine, Profile
from epd_serve.cost.stages import Link
from epd_serve.sim.device import Activity, Clock, SimDevice
from epd_serve.sim.simulator import Simulation, simulate
from epd_serve.sim.spec import Batching, NoWay, SimDeployment, build
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology

TOPOLOGIES = ("EPD", "EP-D", "ED-P", "E-P-D", "(E-P)-D", "(E-D)-P", "(E-PD)", "2E-P-2D", "2EPD")
Deploy = Callable[..., SimDeployment]
ONE_IMAGE = SimRequest(at_s=1.0, images=(("cat", 784 * 500),), num_text_tokens=12, num_output_tokens=5)


@given(
    works=st.lists(
        st.tuples(
            st.floats(0.001, 0.1),
            st.floats(0.05, 1),
            st.floats(0.05, 1),
            st.sampled_from([0, -1]),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_simulated_device_is_as_fast_as_an_emulated_one(
    works: list[tuple[float, float, float, int, int]],
) -> None:
    clock, ends = Clock(), {}
    device = SimDevice(clock)
    running = []
    for number, (left_s, compute, bandwidth, priority, process) in enumerate(works):
        fields = {
            "process": (process, 0, 0),
            "stream": number,
            "left_s": left_s,
            "demand": Demand(compute, bandwidth),
            "priority": priority,
        }
        running.append(Running(**fields))
        device.start(Activity(**fields, on_end=lambda number=number: ends.update({number: clock.now})))
    advance(running, 0.0, 100.0)
    clock.run(lambda: len(ends) == len(works))
    assert [ends[number] for number in range(len(works))] == pytest.approx([one.end_s for one in running])


def times(outcome: Simulation) -> list[tuple[object, ...]]:
    return [(job.first_token_s, job.last_token_s, job.num_output, job.failure) for job in outcome.jobs]


def ttft_s(outcome: Simulation) -> float:
    return fmean(job.ttft_s or 0.0 for job in outcome.jobs)


def one_job(deployment: SimDeployment, request: SimRequest = ONE_IMAGE) -> tuple[float, float]:
    """Seconds until the first token of a request that is alone, and from there to the last."""
    (job,) = simulate(deployment, [request]).jobs
    assert job.first_token_s is not None and job.last_token_s is not None
    return job.first_token_s, job.last_token_s - job.first_token_s


@pytest.mark.parametrize("line", TOPOLOGIES)
def test_the_same_seed_gives_the_same_run_and_all_comes_back(deployed: Deploy, line: str) -> None:
    requests = load(VISUAL_WEB_INSTRUCT, 60, 8.0, seed=1)
    first, second = (simulate(deployed(line), requests) for _ in range(2))
    assert times(first) == times(second)
    assert not any(job.failure for job in first.jobs)
    assert [job.num_output for job in first.jobs] == [64] * 60
    check_books(first)
    assert times(simulate(deployed(line), load(VISUAL_WEB_INSTRUCT, 60, 8.0, seed=2))) != times(first)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_request_ends_under_pressure(deployed: Deploy, data: st.DataObject) -> None:
    """Short pools that preempt, budgets of a few sequences, tight limits."""
    deployment = deployed(
        data.draw(st.sampled_from(TOPOLOGIES)),
        num_blocks=data.draw(st.sampled_from([70, 120, 4000])),
        batching=Batching(
            ttft_s=2.0,
            tpot_s=data.draw(st.sampled_from([None, 0.02, 0.05])),
            max_num_seqs=data.draw(st.sampled_from([3, 64])),
            order=data.draw(st.sampled_from(["fcfs", "sjf", "slack"])),
        ),
        block_size=16,
    )
    short = "synthetic,image_share=0,text_tokens=normal:120:60"
    workload = data.draw(st.sampled_from([SHAREGPT_4O, VISUAL_WEB_INSTRUCT, short]))
    rate, seed = data.draw(st.sampled_from([2.0, 15.0, 60.0])), data.draw(st.integers(0, 99))
    outcome = simulate(deployment, load(workload, 25, rate, seed))
    check_books(outcome)
    for job in outcome.jobs:
        is_whole = job.num_output == job.request.num_output_tokens
        assert is_whole if not job.failure else "blocks" in job.failure, "or it fits in no pool"


def test_a_single_request_takes_the_sum_of_its_stages(deployed: Deploy, ascend: Profile) -> None:
    first_s, rest_s = one_job(deployed("EPD"))
    encode_s, prefill_s = ascend.encode_s([784 * 500]), ascend.step_s(512, 1, 0, 512**2)
    assert first_s == pytest.approx(1.0 + encode_s + prefill_s)
    assert rest_s == pytest.approx(sum(ascend.step_s(1, 1, 513 + i) for i in range(4)))
    feature_s = ascend.handshake_s + 500 * ascend.feature_token_bytes / ascend.link_bytes_per_s
    assert one_job(deployed("E-P-D"))[0] == pytest.approx(first_s + feature_s)


def test_steps_of_decodes_take_the_time_measured_for_their_number(ascend: Profile) -> None:
    lines = (DecodeLine(num_sequences=1, base_s=0.1, context_s=1e-3), DecodeLine(num_sequences=3, base_s=0.3))
    profile = msgspec.structs.replace(ascend, decode=lines)
    request = SimRequest(at_s=0.0, num_text_tokens=12, num_output_tokens=4)
    deployment = build(parse_topology("EPD"), ["npu:0"], lambda *_: profile)
    assert one_job(deployment, request)[1] == pytest.approx(0.3 + 1e-3 * (13 + 14 + 15))


def test_prompts_of_a_step_are_in_the_same_writes_and_late_layers_in_one(
    deployed: Deploy, ascend: Profile
) -> None:
    """As those of KVSender."""
    simulation = Simulation(deployed("EP-2D"), [])
    clock, prefill = simulation.clock, simulation.instances["ep0"]
    clock.now = 1.0
    link, token_s = Link(handshake_s=0.02, bytes_per_s=1e9), ascend.kv_token_bytes / 1e9
    first_s = prefill.send_s("d0", link, 1000, 0.1)
    assert prefill.send_s("d0", link, 500, 0.1) == pytest.approx(first_s + 500 * token_s)
    assert prefill.send_s("d1", link, 1000, 0.1) == pytest.approx(first_s), "it has a link of its own"
    clock.now += 0.001
    later_s = prefill.send_s("d1", link, 100, 0.001)
    assert later_s == pytest.approx(first_s - 0.001 + 0.02 + 100 * token_s), "one handshake, however many layers"


def test_an_engine_that_runs_ahead_takes_arrivals_one_step_later(deployed: Deploy, ascend: Profile) -> None:
    ahead = deployed("EPD")
    (spec,) = ahead.instances
    assert spec.runs_ahead, "on an accelerator"
    plain = replace(ahead, instances=(replace(spec, runs_ahead=False),))
    first = SimRequest(at_s=1.0, num_text_tokens=512, num_output_tokens=400)
    begun = one_job(ahead, first)[0] + sum(ascend.step_s(1, 1, 513 + i) for i in range(100))
    step_s = ascend.step_s(1, 1, 613)

    def waits_longer(**what: Any) -> float:
        other = SimRequest(at_s=begun + step_s / 2, num_output_tokens=1, **what)
        late, early = (simulate(one, [first, other]).jobs[1].first_token_s for one in (ahead, plain))
        assert late is not None and early is not None
        return late - early

    assert waits_longer(num_text_tokens=512) == pytest.approx(step_s, rel=0.01)
    pictured = waits_longer(num_text_tokens=1, images=(("cat", 784 * 500),))
    assert pictured == pytest.approx(step_s, rel=0.05), "its feature comes during a step, too"


def test_an_image_seen_before_is_not_encoded_again(deployed: Deploy) -> None:
    requests = load(SHAREGPT_4O, 80, 10.0)
    few = [replace(one, images=((str(n % 5), 5_000),)) for n, one in enumerate(requests)]
    outcome = simulate(deployed("2E-P-D"), few)
    check_books(outcome)
    assert outcome.num_encoded <= 10
    assert simulate(deployed("2E-P-D"), requests).num_encoded == 80


def test_pictures_that_wait_for_their_encoder_keep_no_place_at_the_decode_instance(deployed: Deploy) -> None:
    deployment = deployed("E-P-D", batching=Batching(ttft_s=2.0, max_num_seqs=2))
    pictures = [
        SimRequest(at_s=1.0, images=((f"{n}", 784 * 5000),), num_text_tokens=12, num_output_tokens=5)
        for n in range(6)
    ]
    text = SimRequest(at_s=1.01, num_text_tokens=12, num_output_tokens=5)
    outcome = simulate(deployment, [*pictures, text])
    check_books(outcome)
    *shown, written = outcome.jobs
    assert (written.finish_s or 0.0) < min(job.first_token_s or 0.0 for job in shown)


def test_equal_stages_on_one_device_slow_each_other_down(deployed: Deploy) -> None:
    requests = load(SHAREGPT_4O, 100, 14.0)
    assert ttft_s(simulate(deployed("E-P-D"), requests)) < ttft_s(simulate(deployed("(E-P)-D"), requests))


def test_prefixes_are_computed_once(deployed: Deploy) -> None:
    fresh = [SimRequest(at_s=i, num_text_tokens=1100, num_output_tokens=2) for i in range(8)]
    known = [replace(one, prefix=(7, 8)) for one in fresh]

    def last_ttft(requests: list[SimRequest]) -> float:
        return simulate(deployed("EPD"), requests).jobs[-1].ttft_s or 0.0

    assert last_ttft(known) < 0.5 * last_ttft(fresh)


def test_each_sequence_needs_room_for_its_recurrent_state(ascend: Profile) -> None:
    """Where the pool has blocks for the states of three, three run at a time."""
    recurrent = msgspec.structs.replace(ascend, state_bytes=100 * 16 * ascend.kv_token_bytes)

    def run(profile: Profile, num_blocks: int = 401) -> Simulation:
        deployment = build(
            parse_topology("PD"), ["npu:0"], lambda *_: profile, block_size=16, num_blocks=num_blocks
        )
        return simulate(deployment, load(TEXT, 12, 100.0, seed=1))

    plain, kept = run(ascend), run(recurrent)
    for outcome in (plain, kept):
        assert not any(job.failure for job in outcome.jobs)
        check_books(outcome)
    assert kept.seconds > 1.5 * plain.seconds
    with pytest.raises(NoWay, match="no room for KV"):
        run(recurrent, num_blocks=105)


def test_a_recurrent_state_is_freed_where_it_was_handed_to(ascend: Profile) -> None:
    recurrent = msgspec.structs.replace(ascend, state_bytes=100 * 16 * ascend.kv_token_bytes)
    devices = ["npu:0", "npu:1"]
    deployment = build(parse_topology("P-D"), devices, lambda *_: recurrent, block_size=16, num_blocks=401)
    outcome = simulate(deployment, load(TEXT, 12, 100.0, seed=1))
    assert not any(job.failure for job in outcome.jobs)
    check_books(outcome)
