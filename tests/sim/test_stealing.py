"""Work stealing in the simulator: the properties of HeteroServe's section 5.3.5."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from hypothesis import given, settings
from hypothesis import strategies as st

from device.datasheets import spec_of
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.flow.stealing import DEFAULT_RULE, Mode, StealRule
from epd_serve.sim.simulator import Fault, Outcome, SimDeployment, build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology, place

PROFILES = {name: analytic_profile(shape_of("llava-1.5-7b"), spec_of(name)) for name in ("rtx-4090", "a100")}
NEVER = replace(DEFAULT_RULE, threshold=1 << 30)


def tiers(line: str = "2EPD-2PD", rule: StealRule | None = None) -> SimDeployment:
    topology = parse_topology(line)
    roles = [str(one.role) for one in place(topology, ["cpu"])]
    devices = [f"{'rtx-4090' if role == 'EPD' else 'a100'}:{number}" for number, role in enumerate(roles)]
    deployment = build(
        topology,
        devices,
        lambda device, width: PROFILES[device.split(":")[0]],
        batching=lambda role: Batching(policy="unlimited", max_num_seqs=16 if role.encodes else 64),
        steals=True,
    )
    return replace(deployment, steal=rule or DEFAULT_RULE)


def requests_of(gaps: list[float], num_output_tokens: int = 40) -> list[SimRequest]:
    at_s, requests = 0.0, []
    for number, gap in enumerate(gaps):
        at_s += gap
        images = ((f"image {number}", 1),) if number % 4 else ()
        requests.append(
            SimRequest(at_s=at_s, images=images, num_text_tokens=40, num_output_tokens=num_output_tokens)
        )
    return requests


def waits(outcome: Outcome) -> list[float]:
    """Until the first token."""
    found = [job.first_token_s - job.sent_s for job in outcome.jobs if job.first_token_s is not None]
    assert len(found) == len(outcome.jobs) and not any(job.failure for job in outcome.jobs)
    return found


def test_idle_encoders_add_to_the_throughput() -> None:
    requests = requests_of([0.0] * 400, 128)
    without, stealing = (simulate(tiers(rule=rule), requests) for rule in (NEVER, None))
    check_books(stealing)
    taken = stealing.gateways[0].stealing
    assert taken is not None and set(taken.num_taken) == {"epd0", "epd1"}
    assert without.gateways[0].stealing is not None and not without.gateways[0].stealing.num_taken
    assert without.seconds > 1.1 * stealing.seconds
    assert [job.num_output for job in stealing.jobs] == [128] * 400


@settings(max_examples=12, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.3, 2.0]), min_size=40, max_size=160),
    line=st.sampled_from(["EPD-PD", "2EPD-2PD", "EPD-P-D"]),
)
def test_queueing_delay_does_not_grow_and_modes_do_not_thrash(gaps: list[float], line: str) -> None:
    """Properties 2 and 3."""
    requests = requests_of(gaps)
    without, stealing = (simulate(tiers(line, rule), requests) for rule in (NEVER, None))
    check_books(stealing)
    assert fmean(waits(stealing)) <= fmean(waits(without)) * (1 + 1e-6) + 0.03, "but for a step that images wait"
    taken = stealing.gateways[0].stealing
    assert taken is not None
    for name in taken.num_taken:
        switches = taken.thieves[name].num_switches
        encoded = stealing.instances[name].tower.num_encoded
        assert sum(count for (_, mode), count in switches.items() if mode is Mode.VISION) <= encoded


def test_an_image_waits_for_no_more_than_the_step_under_way() -> None:
    """Property 1: a burst of images comes to thieves that are full of stolen sequences."""
    backlog = [replace(one, images=()) for one in requests_of([0.0] * 200, 128)]
    burst = [replace(one, at_s=1.0, num_output_tokens=1) for one in requests_of([0.0] * 60) if one.images]
    outcome = simulate(tiers(), [*backlog, *burst])
    check_books(outcome)
    profile = PROFILES["rtx-4090"]
    step_s = max(profile.step_s(16, 16, 16 * 800), profile.step_s(2048, 4, 4 * 700, 4 * 700**2))
    together_s = profile.encode_s([1] * len(burst))  # more than either of two thieves has to do
    for job in outcome.jobs[len(backlog) :]:
        assert job.encoded_s is not None
        assert job.encoded_s - job.sent_s <= together_s + step_s + profile.request_s + 1e-6


def test_what_a_thief_takes_to_its_grave_goes_on_elsewhere() -> None:
    requests = requests_of([0.0] * 120)
    outcome = simulate(tiers("EPD-PD"), requests, faults=[Fault(at_s=0.5, instance="epd0", down_s=0.5)])
    check_books(outcome)
    assert [job.num_output for job in outcome.jobs] == [40] * 120
