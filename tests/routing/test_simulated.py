"""The real policies before simulated instances, with a virtual clock."""

import random

import pytest
from sim_load import check_books

from epd_serve.cost.profile import DecodeLine, EncodeLine, Line, Profile
from epd_serve.routing.routes import RoutePolicy, Router
from epd_serve.sim.simulator import SimDeployment, simulate
from epd_serve.sim.spec import Batching, SimInstanceSpec
from epd_serve.sim.workloads import SimRequest
from epd_serve.types import Role, Stage


def profile(slowness=1.0):
    """An image of 450 x 450 pixels takes 22 ms, a prompt of 1000 tokens as long, a decode step 10 ms."""
    return Profile(
        kind="measured",
        device="cuda",
        model="m",
        step=(Line(base_s=0.002 * slowness, token_s=2e-5 * slowness),),
        encode=(EncodeLine(base_s=0.002, pixel_s=1e-7),),
        decode=tuple(
            DecodeLine(num_sequences=count, base_s=(0.01 + 2e-4 * count) * slowness) for count in (1, 1000)
        ),
        kv_token_bytes=1000,
        feature_token_bytes=1000,
        tokens_per_image=1,
    )


def fleet(*roles, slow=(), slowness=1.0):
    """Instances on devices of their own; those at the places ``slow`` take ``slowness`` times as long."""
    counts = {}
    made = []
    for place, role in enumerate(roles):
        number = counts[role] = counts.get(role, -1) + 1
        made.append(
            SimInstanceSpec(
                name=f"{role.lower()}{number}",
                role=Role.parse(role),
                profile=profile(slowness if place in slow else 1.0),
                device=f"cuda:{place}",
                num_blocks=1 << 16,
                batching=Batching(image_budget_pixels=1),
            )
        )
    return SimDeployment(instances=tuple(made))


def workload(seed, num_requests, rate, max_tokens=2000):
    rng, at_s, images, made = random.Random(seed), 0.0, [], []
    for number in range(num_requests):
        at_s += rng.expovariate(rate)
        if not images or rng.random() >= 0.6:
            images.append((f"{seed} {number}", rng.choice([50_000, 200_000, 800_000])))
            image = images[-1]
        else:
            image = rng.choice(images)
        num_tokens = rng.randint(1, max_tokens)
        made.append(SimRequest(at_s=at_s, images=(image,), num_text_tokens=num_tokens, num_output_tokens=20))
    return made


def waits_s(outcome):
    check_books(outcome)
    return sorted(job.first_token_s - job.sent_s for job in outcome.jobs if job.first_token_s is not None)


def chosen(outcome):
    """Times that each instance was chosen, by all gateways."""
    return {
        name: sum(gateway.table[name].num_chosen[stage] for gateway in outcome.gateways for stage in Stage)
        for name in outcome.instances
    }


@pytest.mark.parametrize("name", ["least_loaded", "round_robin", "prefix_affinity"])
def test_no_instance_starves(name):
    """One that is four times as slow still gets some of a load that the others alone can hardly do."""
    deployment = fleet("E", "P", "P", "P", "D", "D", slow=(3, 5), slowness=4.0)
    outcome = simulate(deployment, workload(1, 300, 300.0), routers=[Router(RoutePolicy(name))])
    assert len(waits_s(outcome)) == 300
    assert all(number >= 10 for number in chosen(outcome).values()), chosen(outcome)


def test_what_a_gateway_knows_is_what_there_is():
    """After each report, the two gateways together count no work twice and forget none."""
    seen = []
    for num_reports in (3, 6, 9, 12, 15):
        reports = iter([False] * num_reports)
        deployment = fleet("E", "E", "P", "D")
        outcome = simulate(
            deployment,
            workload(9, 200, 60.0),
            routers=[Router(), Router()],
            give_up=lambda done, reports=reports: next(reports, True),
        )
        for gateway in outcome.gateways:
            for record in gateway.table:
                load = outcome.instances[record.name].load()
                assert record.pending.num_pixels == pytest.approx(load.num_waiting_pixels, abs=1)
                seen.append(record.pending.num_pixels)
    assert max(seen) > 0
