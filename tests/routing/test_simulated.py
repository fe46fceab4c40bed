"""The real policies before simulated instances, with a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ablations.routing import RandomOfTwo, RandomOfTwoEncoders, RoundRobinEncoders
from benchmarks.routing_simulator import Gateway, Request, SimulatedInstance, simulate
from epd_serve.routing.choice import EncoderChoice, RouteChoice, Router
from epd_serve.routing.encoders import BoundedHash
from epd_serve.routing.routes import LeastLoaded, PrefixAffinity, RoundRobin
from epd_serve.types import StageRate

RATES = {"E": StageRate(0.002, 1e-7), "P": StageRate(0.002, 2e-5), "D": StageRate(0.01, 2e-4)}
ROUTES: dict[str, Callable[[int], RouteChoice]] = {
    "least_loaded": lambda seed: LeastLoaded(),
    "round_robin": lambda seed: RoundRobin(),
    "random_of_two": lambda seed: RandomOfTwo(random.Random(seed).random),
    "prefix_affinity": lambda seed: PrefixAffinity(),
}


def fleet(*roles: str, rates: dict[str, StageRate] = RATES) -> list[SimulatedInstance]:
    counts: dict[str, int] = {}
    made = []
    for role in roles:
        number = counts[role] = counts.get(role, -1) + 1
        made.append(SimulatedInstance(name=f"{role.lower()}{number}", role=role, rates=rates))
    return made


def workload(seed: int, num_requests: int, rate: float, max_tokens: int = 2000) -> list[Request]:
    rng, at_s, images, made = random.Random(seed), 0.0, [], []
    for number in range(num_requests):
        at_s += rng.expovariate(rate)
        if not images or rng.random() >= 0.6:
            images.append((f"{seed} {number}", rng.choice([50_000, 200_000, 800_000])))
            image = images[-1]
        else:
            image = rng.choice(images)
        made.append(Request(at_s=at_s, images=(image,), num_tokens=rng.randint(1, max_tokens)))
    return made


def ideal(requests: list[Request]) -> float:
    return 1 - len({request.images for request in requests}) / len(requests)


class Watched:
    """A policy whose every choice is checked: nothing that is lost, excluded, or of another stage."""

    def __init__(self, router: Router, lost: set[str]) -> None:
        self._router = router
        self._lost = lost
        self.chosen: list[str] = []
        self.uses_prefix = router.routes.uses_prefix

    def choose_route(self, table, model, **more):
        route = self._router.routes.choose_route(table, model, **more)
        self._check(route.prefill, "P", more.get("exclude", ()))
        self._check(route.decode, "D", more.get("exclude", ()))
        return route

    def choose_encoders(self, table, prefill, items, **more):
        records = self._router.encoders.choose_encoders(table, prefill, items, **more)
        assert len(records) == len(items)
        for record in records:
            self._check(record, "E" if record is not prefill else "P", more.get("exclude", ()))
        return records

    def _check(self, record, letter, exclude):
        assert letter in str(record.role)
        assert record.name not in self._lost
        assert record.name not in exclude
        self.chosen.append(record.name)


@pytest.mark.parametrize("name", ROUTES)
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), num_lost=st.integers(0, 1), kinds=st.sampled_from(["EPD", "apart", "EP-D"]))
def test_only_instances_that_are_ready_are_chosen_and_all_requests_end(name, seed, num_lost, kinds):
    roles = {"EPD": ["EPD"] * 3, "apart": ["E", "E", "P", "P", "D", "D"], "EP-D": ["EP", "EP", "E", "D", "D"]}[
        kinds
    ]
    instances = fleet(*roles)
    lost = set()
    for one in random.Random(seed).sample(instances, num_lost):
        if sum(other.role == one.role for other in instances) > 1:
            one.ready = False
            lost.add(one.name)
    policy = Watched(Router(ROUTES[name](seed)), lost)
    outcome = simulate(instances, [Router(policy, policy)], workload(seed, 60, 30.0))
    assert outcome.mean_wait_s > 0
    assert all(one.num_served == 0 for one in instances if one.name in lost)


@pytest.mark.parametrize("name", ROUTES)
def test_a_run_is_the_same_each_time(name):
    def run():
        instances = fleet("E", "E", "P", "P", "D", "D")
        policies = [Router(ROUTES[name](seed), RandomOfTwoEncoders(random.Random(seed).random)) for seed in (1, 2)]
        return simulate(instances, policies, workload(3, 150, 40.0)), [one.num_served for one in instances]

    assert run() == run()


@pytest.mark.parametrize("name", ROUTES)
def test_no_instance_starves(name):
    """One that is four times as slow still gets some of a load that the others alone can hardly do."""
    instances = fleet("E", "P", "P", "P", "D", "D")
    slow = {**RATES, "P": StageRate(0.008, 8e-5), "D": StageRate(0.02, 4e-4)}
    instances[3].rates = instances[5].rates = slow
    simulate(instances, [Router(ROUTES[name](1))], workload(1, 300, 120.0))
    assert all(one.num_served >= 10 for one in instances), [one.num_served for one in instances]


def waits(policy: RouteChoice) -> float:
    """Prompts of very different lengths on unequal instances."""
    instances = fleet("E", "P", "P", "P", "D", "D")
    instances[3].rates = {**RATES, "P": StageRate(0.006, 6e-5)}
    return simulate(instances, [Router(policy)], workload(5, 400, 75.0)).mean_wait_s


def test_seconds_are_a_better_load_than_turns():
    least, turns = waits(LeastLoaded()), waits(RoundRobin())
    two = waits(RandomOfTwo(random.Random(1).random))
    assert least < two < turns
    assert least < 0.6 * turns


@pytest.mark.parametrize("num_gateways", [1, 2])
@pytest.mark.parametrize("num_encoders", [2, 4])
def test_repeated_images_are_encoded_once_and_encoders_work_evenly(num_encoders, num_gateways):
    requests = workload(7, 600, 0.6 * num_encoders / (0.4 * 0.037), max_tokens=100)

    def run(encoders: EncoderChoice):
        return simulate(
            fleet(*["E"] * num_encoders, "P", "D"), [Router(encoders=encoders)] * num_gateways, requests
        )

    bounded = run(BoundedHash())
    # two gateways learn of each other's choices a report later
    assert bounded.hit_rate >= (0.95 if num_gateways == 1 else 0.9) * ideal(requests)
    assert bounded.imbalance <= 1.25
    hashing = run(BoundedHash(bound=float("inf"), even=float("inf")))
    assert hashing.hit_rate == pytest.approx(ideal(requests))
    assert bounded.p99_wait_s < hashing.p99_wait_s
    for other in (RoundRobinEncoders(), RandomOfTwoEncoders(random.Random(1).random)):
        assert run(other).hit_rate < 0.8 * ideal(requests)


def test_what_a_gateway_knows_is_what_there_is():
    """After each report, the two gateways together count no work twice and forget none."""
    instances = fleet("E", "E", "P", "D")
    seen = []

    def watch(gateways: list[Gateway]) -> None:
        for gateway in gateways:
            for record in gateway.table:
                load = gateway.instances[record.name].load()
                assert record.pending.num_pixels == pytest.approx(load.num_waiting_pixels, abs=1)
                seen.append(record.pending.num_pixels)

    simulate(instances, [Router(), Router()], workload(9, 200, 60.0), watch=watch)
    assert max(seen) > 0
