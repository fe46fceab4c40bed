"""The simulator against itself, against arithmetic, and against taking its steps one by one."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.shapes import SHAREGPT_4O, TEXT, VISUAL_WEB_INSTRUCT, WorkloadShape
from epd_serve.cost.profile import Profile
from epd_serve.cost.stages import Link
from epd_serve.sim.device import Clock, SimDevice
from epd_serve.sim.instance import SimInstance
from epd_serve.sim.language import LanguageSide
from epd_serve.sim.simulator import Fault, NoWay, Outcome, SimDeployment, build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.sim.workloads import SimRequest, at_rate
from epd_serve.topology import parse_topology

TOPOLOGIES = ("EPD", "EP-D", "ED-P", "E-P-D", "(E-P)-D", "(E-D)-P", "(E-PD)", "2E-P-2D", "2EPD")
Deploy = Callable[..., SimDeployment]


def times(outcome: Outcome) -> list[tuple[object, ...]]:
    return [(job.first_token_s, job.last_token_s, job.num_output, job.failure) for job in outcome.jobs]


def close(one: Outcome, other: Outcome) -> bool:
    """To within rounding."""

    def rounded(outcome: Outcome) -> list[tuple[object, ...]]:
        return [tuple(-1.0 if at is None else at for at in row) for row in times(outcome)]

    return all(
        a[2:] == b[2:] and a[:2] == pytest.approx(b[:2], rel=1e-9, abs=1e-7)
        for a, b in zip(rounded(one), rounded(other), strict=True)
    )


@pytest.mark.parametrize("line", TOPOLOGIES)
def test_the_same_seed_gives_the_same_run_and_all_comes_back(deployed: Deploy, line: str) -> None:
    requests = VISUAL_WEB_INSTRUCT.requests(60, 8.0, seed=1)
    first, second = (simulate(deployed(line), requests) for _ in range(2))
    assert times(first) == times(second)
    assert not any(job.failure for job in first.jobs)
    assert [job.num_output for job in first.jobs] == [64] * 60
    check_books(first)
    assert times(simulate(deployed(line), VISUAL_WEB_INSTRUCT.requests(60, 8.0, seed=2))) != times(first)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_steps_taken_together_are_steps_taken_singly(deployed: Deploy, data: st.DataObject) -> None:
    """Whatever presses: short pools that preempt, budgets of a few sequences, limits that are tight, faults."""
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
        dual_stream=data.draw(st.booleans()),
    )
    shape = data.draw(st.sampled_from([SHAREGPT_4O, VISUAL_WEB_INSTRUCT, replace(TEXT, num_text_tokens=120)]))
    requests = shape.requests(
        25, data.draw(st.sampled_from([2.0, 15.0, 60.0])), seed=data.draw(st.integers(0, 99))
    )
    faults = []
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([one.name for one in deployment.instances]))
        faults = [Fault(at_s=data.draw(st.floats(0.01, 2)), instance=name, down_s=0.5)]
    together = simulate(deployment, requests, faults=faults)
    check_books(together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageSide, "_length", lambda self, output: 1)
        singly = simulate(deployment, requests, faults=faults)
    check_books(singly)
    assert close(together, singly)
    assert together.num_steps == singly.num_steps
    assert together.num_preempted == singly.num_preempted


def test_a_request_alone_takes_what_its_stages_take(deployed: Deploy, ascend: Profile) -> None:
    request = SimRequest(at_s=1.0, images=(("cat", 784 * 500),), num_text_tokens=12, num_output_tokens=5)
    (job,) = simulate(deployed("EPD"), [request], gaps=True).jobs
    assert job.first_token_s is not None and job.last_token_s is not None
    encode_s, prefill_s = ascend.encode_s([784 * 500]), ascend.step_s(512, 1, 0, 512**2)
    assert job.first_token_s == pytest.approx(1.0 + encode_s + prefill_s)
    steps = [ascend.step_s(1, 1, 513 + i) for i in range(4)]
    assert job.last_token_s == pytest.approx(job.first_token_s + sum(steps))
    assert len(job.token_times_s) == 5 and job.token_times_s[0] == job.first_token_s
    assert job.token_times_s[-1] == pytest.approx(job.last_token_s)
    (apart,) = simulate(deployed("E-P-D"), [request]).jobs
    assert apart.first_token_s is not None
    feature_s = ascend.handshake_s + 500 * ascend.feature_token_bytes / ascend.link_bytes_per_s
    assert apart.first_token_s == pytest.approx(job.first_token_s + feature_s)


def test_prompts_of_a_step_are_in_the_same_writes_and_late_layers_in_one(
    deployed: Deploy, ascend: Profile
) -> None:
    """As those of KVSender."""
    clock = Clock()
    clock.now = 1.0
    spec = deployed("EP-2D").instances[0]
    prefill = SimInstance(clock, SimDevice(clock), spec, on_prompt=lambda *_: None, on_end=lambda _: None)
    link, token_s = Link(handshake_s=0.02, bytes_per_s=1e9), ascend.kv_token_bytes / 1e9
    first_s = prefill.send_s("d0", link, 1000, 0.1)
    assert prefill.send_s("d0", link, 500, 0.1) == pytest.approx(first_s + 500 * token_s)
    assert prefill.send_s("d1", link, 1000, 0.1) == pytest.approx(first_s), "it has a link of its own"
    clock.now += 0.001
    later_s = prefill.send_s("d1", link, 100, 0.001)
    assert later_s == pytest.approx(first_s - 0.001 + 0.02 + 100 * token_s), "one handshake, however many layers"


def test_what_comes_while_a_step_runs_waits_for_one_more_where_the_engine_runs_ahead(deployed: Deploy) -> None:
    ahead = deployed("EPD")
    (spec,) = ahead.instances
    assert spec.runs_ahead, "on an accelerator"
    plain = replace(ahead, instances=(replace(spec, runs_ahead=False),))
    first = SimRequest(at_s=1.0, num_text_tokens=512, num_output_tokens=400)
    (alone,) = simulate(ahead, [first], gaps=True).jobs
    begun, ended, after = alone.token_times_s[100:103]

    def waits_longer(**what: Any) -> float:
        other = SimRequest(at_s=(begun + ended) / 2, num_output_tokens=1, **what)
        late, early = (simulate(one, [first, other]).jobs[1].first_token_s for one in (ahead, plain))
        assert late is not None and early is not None
        return late - early

    assert waits_longer(num_text_tokens=512) == pytest.approx(after - ended, rel=0.01)
    pictured = waits_longer(num_text_tokens=1, images=(("cat", 784 * 500),))
    assert pictured == pytest.approx(after - ended, rel=0.05), "its feature comes during a step, too"


def test_an_image_seen_before_is_not_encoded_again(deployed: Deploy) -> None:
    few = WorkloadShape(name="few", num_distinct=5)
    outcome = simulate(deployed("2E-P-D"), few.requests(80, 10.0, seed=0))
    check_books(outcome)
    assert outcome.encoded <= 10
    assert simulate(deployed("2E-P-D"), SHAREGPT_4O.requests(80, 10.0, seed=0)).encoded == 80


def test_encoders_share_a_video(deployed: Deploy, ascend: Profile) -> None:
    """64 frames of 448 pixels square: two are as much as a picture. One encoder dies while it has a segment."""
    picture = 448 * 448
    encode_s, tokens = ascend.encode_s([picture] * 32), 32 * ascend.image_tokens(picture)
    seen: dict[int, float] = {}
    for count, faults in ((1, []), (2, []), (4, []), (3, [Fault(at_s=0.05, instance="e1", down_s=9.0)])):
        request = SimRequest(at_s=0, videos=(("clip", picture, 64),), num_text_tokens=9, num_output_tokens=2)
        outcome = simulate(deployed(f"{count}E-P-D"), [request, replace(request, at_s=20.0)], faults=faults)
        check_books(outcome)
        first, again = outcome.jobs
        assert not first.failure and first.num_tokens == tokens + 9 and first.first_token_s is not None
        made = [one.tower.num_encoded for name, one in outcome.instances.items() if name[0] == "e"]
        assert sum(made) == count + (count == 3) if faults else made == [1] * count
        assert again.first_token_s is not None and again.first_token_s - 20 < first.first_token_s
        seen[count] = first.first_token_s
    assert 0.9 * encode_s / 4 < seen[2] - seen[4] < 1.1 * encode_s / 4
    assert 0.9 * encode_s / 2 < seen[1] - seen[2] < 1.1 * encode_s / 2


def test_like_stages_on_one_device_slow_each_other_down(deployed: Deploy) -> None:
    requests = SHAREGPT_4O.requests(100, 14.0, seed=0)

    def ttft(line: str) -> float:
        jobs = simulate(deployed(line), requests).jobs
        return sum((job.first_token_s or 0) - job.sent_s for job in jobs) / len(jobs)

    assert ttft("E-P-D") < ttft("(E-P)-D")


def test_prefixes_are_computed_once(deployed: Deploy) -> None:
    fresh = [SimRequest(at_s=i, num_text_tokens=1100, num_output_tokens=2) for i in range(8)]
    known = [replace(one, prefix=(7, 8)) for one in fresh]

    def last_ttft(requests: list[SimRequest]) -> float:
        job = simulate(deployed("EPD", routing="prefix_affinity"), requests).jobs[-1]
        return (job.first_token_s or 0) - job.sent_s

    assert last_ttft(known) < 0.5 * last_ttft(fresh)


def test_what_dies_is_replaced(deployed: Deploy) -> None:
    requests = SHAREGPT_4O.requests(80, 10.0, seed=3)
    faults = [Fault(at_s=2.0, instance="d0", down_s=3.0), Fault(at_s=4.0, instance="p0", down_s=1.0)]
    outcome = simulate(deployed("2E-2P-2D"), requests, faults=faults)
    check_books(outcome)
    assert not any(job.failure for job in outcome.jobs)
    assert any(job.num_retries for job in outcome.jobs)
    assert {job.num_output for job in outcome.jobs} == {64}
    alone = simulate(deployed("E-P-D"), requests, faults=[Fault(at_s=2.0, instance="d0", down_s=3.0)])
    check_books(alone)
    assert any("no instance for decode" in job.failure for job in alone.jobs)


def test_what_cannot_be_is_said(deployed: Deploy) -> None:
    with pytest.raises(NoWay, match="no room for KV"):
        simulate(deployed("EPD", num_blocks=2), [])
    with pytest.raises(ValueError, match="there are e0, p0, d0"):
        simulate(deployed("E-P-D"), [], faults=[Fault(at_s=0, instance="x", down_s=1)])
    with pytest.raises(ValueError, match="a prompt, an answer"):
        SimRequest(at_s=0, num_text_tokens=0, num_output_tokens=1)


def test_rates_are_stretched() -> None:
    requests = at_rate(TEXT.requests(101, 3.0, seed=0), 10.0)
    assert requests[-1].at_s == pytest.approx(10.0)
    assert at_rate([], 1.0) == []


def test_no_torch_and_no_clock() -> None:
    check = "import sys, epd_serve.sim.simulator, epd_serve.sim.workloads; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_recurrent_state_takes_room_of_each_sequence(ascend: Profile) -> None:
    """Where the pool has blocks for the states of three, three run at a time."""
    recurrent = msgspec.structs.replace(ascend, state_bytes=100 * 16 * ascend.kv_token_bytes)
    requests = TEXT.requests(12, 100.0, seed=1)

    def run(profile: Profile) -> Outcome:
        topology = parse_topology("PD")
        return simulate(build(topology, ["npu:0"], lambda *_: profile, block_size=16, num_blocks=401), requests)

    plain, kept = run(ascend), run(recurrent)
    for outcome in (plain, kept):
        assert not any(job.failure for job in outcome.jobs)
        check_books(outcome)
    assert kept.jobs[-1].last_token_s > 1.5 * plain.jobs[-1].last_token_s
    with pytest.raises(NoWay, match="no room for KV"):
        simulate(
            build(parse_topology("PD"), ["npu:0"], lambda *_: recurrent, block_size=16, num_blocks=105), requests
        )
