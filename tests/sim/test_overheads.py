"""Times that a profile adds to stages, and stages that share a device."""

from statistics import fmean

import msgspec
import pytest

from benchmarks.shapes import SHAREGPT_4O
from epd_serve.cost.profile import DecodeLine, Profile
from epd_serve.sim.simulator import Fault, Outcome, SimDeployment, build, check_books, simulate
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology

REQUEST = SimRequest(at_s=1.0, images=(("cat", 784 * 500),), num_text_tokens=12, num_output_tokens=3)


@pytest.fixture
def slow(ascend: Profile) -> Profile:
    return msgspec.structs.replace(ascend, request_s=0.01)


def deployed(line: str, profile: Profile) -> SimDeployment:
    topology = parse_topology(line)
    return build(topology, [f"npu:{i}" for i in range(topology.num_devices)], lambda *_: profile)


@pytest.mark.parametrize("line", ["EPD", "E-P-D"])
def test_the_first_token_waits_for_the_gateway(line: str, ascend: Profile, slow: Profile) -> None:
    def times(profile: Profile) -> tuple[float, float]:
        (job,) = simulate(deployed(line, profile), [REQUEST]).jobs
        assert job.first_token_s is not None and job.last_token_s is not None
        return job.first_token_s, job.last_token_s - job.first_token_s

    assert times(slow) == pytest.approx((times(ascend)[0] + 0.01, times(ascend)[1]))


def test_steps_of_decodes_take_what_their_number_was_measured_to(ascend: Profile) -> None:
    lines = (DecodeLine(num_sequences=1, base_s=0.1, context_s=1e-3), DecodeLine(num_sequences=3, base_s=0.3))
    profile = msgspec.structs.replace(ascend, decode=lines)
    alone = SimRequest(at_s=0.0, images=(), num_text_tokens=12, num_output_tokens=4)
    (job,) = simulate(deployed("EPD", profile), [alone]).jobs
    assert job.first_token_s is not None and job.last_token_s is not None
    assert job.last_token_s - job.first_token_s == pytest.approx(0.3 + 1e-3 * (13 + 14 + 15))


def test_instances_that_die_leave_nothing_open(slow: Profile) -> None:
    for name in ("e0", "p0", "d0"):
        faults = [Fault(at_s=at_s, instance=name, down_s=0.3) for at_s in (1.0, 2.0)]
        requests = SHAREGPT_4O.requests(40, 12.0, seed=4)
        outcome = simulate(deployed("2E-2P-2D", slow), requests, faults=faults)
        check_books(outcome)
        assert not any(job.failure for job in outcome.jobs)


def on_cpu(line: str, profile: Profile, requests: list[SimRequest]) -> Outcome:
    deployment = build(parse_topology(line), ["cpu"], lambda *_: profile, num_blocks=4096)
    return simulate(deployment, requests)


def ttft_s(outcome: Outcome) -> float:
    return fmean((job.first_token_s or 0.0) - job.sent_s for job in outcome.jobs)


def test_a_cpu_has_cores_for_all_but_those_in_parentheses(slow: Profile) -> None:
    requests = SHAREGPT_4O.requests(40, 10.0, seed=0)
    apart, together = (on_cpu(line, slow, requests) for line in ("E-P-D", "(E-P)-D"))
    assert len(apart.busy) == 3 and len(together.busy) == 2
    assert ttft_s(together) > ttft_s(apart)
