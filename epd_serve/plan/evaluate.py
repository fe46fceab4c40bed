"""Evaluate a plan: an analytic bound of its rate, and its goodput by simulation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from epd_serve.cost.profile import Profile
from epd_serve.cost.stages import MAX_BATCH_PIXELS
from epd_serve.plan.pools import Fleet, Pool
from epd_serve.plan.space import Candidate
from epd_serve.sim.simulator import Job, Simulation, simulate
from epd_serve.sim.spec import Batching, NoWay, SimDeployment, SimInstanceSpec, build
from epd_serve.sim.workloads import SimRequest, at_rate
from epd_serve.types import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanRequest:
    """The mean request of a workload; ``image_pixels`` is per image."""

    num_images: float
    image_pixels: float
    num_text_tokens: float
    num_output_tokens: float

    @classmethod
    def of(cls, requests: Sequence[SimRequest]) -> MeanRequest:
        """Average the requests. Equal images count once, because they are encoded once."""
        distinct = {item.mm_hash: item for one in requests for item in one.media}.values()
        num, num_images = len(requests), len(distinct)
        return cls(
            num_images=num_images / num,
            image_pixels=sum(item.num_pixels for item in distinct) / num_images if num_images else 0.0,
            num_text_tokens=fmean(one.num_text_tokens for one in requests),
            num_output_tokens=fmean(one.num_output_tokens for one in requests),
        )

    def num_prompt_tokens(self, profile: Profile) -> float:
        image = profile.image_tokens(round(self.image_pixels)) if self.num_images else 0
        return self.num_images * image + self.num_text_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The upper bound of a plan's rate.

    Attributes:
        rate: requests per second that saturate the first device.
        bottleneck: the stage that uses most of that device.
        loads: seconds per request of each stage, on one instance that does nothing else.
    """

    rate: float
    bottleneck: Stage
    loads: dict[Stage, float]


def bound(deployment: SimDeployment, mean: MeanRequest, *, ttft_s: float | None, tpot_s: float | None) -> Bound:
    """Return the bound of a deployment, with each stage's work divided among its instances by their speed."""
    loads: dict[Stage, float] = {}
    busy: dict[str, dict[Stage, float]] = {}  # seconds per request, by device
    profiles: dict[str, Profile] = {}
    for stage in Stage:
        covering = [one for one in deployment.instances if stage in one.role.stages]
        if stage is Stage.DECODE:  # PD instances keep their own prompts
            covering = [one for one in covering if one.role.prefills] or covering
        seconds = [_stage_s(one, mean, stage, ttft_s=ttft_s, tpot_s=tpot_s) for one in covering]
        speed = sum(1 / value for value in seconds if value > 0)
        if speed:
            loads[stage] = min(seconds)
            for one in covering:
                device = f"{one.host}/{one.device}"
                profiles.setdefault(device, one.profile)
                busy.setdefault(device, dict.fromkeys(Stage, 0.0))[stage] += 1 / speed
    totals = {device: _device_s(stages, profiles[device]) for device, stages in busy.items()}
    worst = max(totals, key=lambda device: totals[device])
    return Bound(
        rate=1 / totals[worst] if totals[worst] > 0 else math.inf,
        bottleneck=max(busy[worst], key=lambda stage: busy[worst][stage]),
        loads=loads,
    )


def _stage_s(
    spec: SimInstanceSpec, mean: MeanRequest, stage: Stage, *, ttft_s: float | None, tpot_s: float | None
) -> float:
    """Return the seconds of one stage of a request in full batches (EPD-Serve, algorithm 2, lines 6 to 11)."""
    profile = spec.profile
    if stage is Stage.ENCODE:
        if not mean.num_images or not profile.encode:
            return 0.0
        pixels = round(mean.image_pixels)
        count = max(1, MAX_BATCH_PIXELS // max(pixels, 1))
        while count > 1 and ttft_s is not None and profile.encode_s([pixels] * count) > ttft_s / 2:
            count //= 2
        return mean.num_images * profile.encode_s([pixels] * count) / count
    num_tokens = mean.num_prompt_tokens(profile)
    if stage is Stage.PREFILL:
        together = max(1, int(spec.batching.max_num_tokens // max(num_tokens, 1)))
        return profile.step_s(num_tokens * together, together, 0, together * num_tokens**2) / together
    context = num_tokens + mean.num_output_tokens / 2
    held = context + spec.state_blocks * spec.block_size
    room = max(int(spec.num_blocks * spec.block_size / max(held, 1)), 1)
    batch = max(min(spec.batching.max_num_seqs, room), 1)
    while batch > 1 and tpot_s is not None and profile.step_s(batch, batch, batch * context) > tpot_s:
        batch = max(int(batch * 0.9), batch // 2) if batch > 2 else 1
    return max(mean.num_output_tokens - 1, 0.0) * profile.step_s(batch, batch, batch * context) / batch


def _device_s(stages: dict[Stage, float], profile: Profile) -> float:
    """Return the seconds per request of a device.

    The tower overlaps the language model except for shared resources; prefill and decode do not overlap.
    """
    language, tower = stages[Stage.PREFILL] + stages[Stage.DECODE], stages[Stage.ENCODE]
    if profile.kind == "measured":
        return language + tower
    compute = profile.compute_share * (tower + stages[Stage.PREFILL]) + 0.1 * stages[Stage.DECODE]
    return max(language, tower, compute)


#: Share of requests that must keep both limits (TriInfer, section 2.2).
TARGET = 0.9
#: Relative precision of a search.
PRECISION = 0.02
#: Factor by which confirming simulations are longer, to reveal slowly growing queues. Their rate is slightly above
#: the reported one.
LONGER = 10
_HEADROOM = 1.03
#: Relative precision of the confirmation.
_CONFIRM_PRECISION = 1.05
_MAX_RATE = 1e5
#: Devices of a host.
_PER_HOST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The SLO of a plan, and the weight of its cost.

    Attributes:
        beta: requests per second that one unit of cost is worth (EPD, equation 1).
    """

    ttft_s: float | None
    tpot_s: float | None
    beta: float = 0.0

    @classmethod
    def read(cls, text: str, beta: float = 0.0) -> Goal:
        """Read limits in milliseconds, as in ``ttft=2000,tpot=50``. Raises ValueError for anything else."""
        limits_s: dict[str, float | None] = {"ttft": None, "tpot": None}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                limit_s = float(value) / 1e3
            except ValueError:
                limit_s = -1.0
            if name not in limits_s or not 0 < limit_s < math.inf:
                raise ValueError(
                    f"--slo {text}: {part!r} is not a limit; write milliseconds, as in ttft=2000,tpot=50"
                )
            limits_s[name] = limit_s
        return cls(ttft_s=limits_s["ttft"], tpot_s=limits_s["tpot"], beta=beta)

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        text = " and ".join(f"{name} {1e3 * limit:g} ms" for name, limit in limits if limit is not None)
        return f"{text} for {TARGET:.0%} of requests"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """``goodput``: the highest sustained rate found, at most the bound; ``reason``: why it is 0."""

    candidate: Candidate
    goodput: float
    objective: float
    cost: float
    bound: Bound
    reason: str = ""


class Evaluator:
    """Simulates plans on one workload at various rates, by scaling its times.

    Attributes:
        num_simulations, num_requests: totals so far.
        horizon_s, most: simulated time of a search's simulation, enough for queues to grow, and its most requests.

    Args:
        requests: the trace, repeated if it is too short.
        on_simulated: called after each simulation.
    """

    def __init__(
        self,
        fleet: Fleet,
        goal: Goal,
        requests: Sequence[SimRequest],
        *,
        least: int = 100,
        most: int = 1500,
        on_simulated: Callable[[], None] = lambda: None,
    ) -> None:
        if not requests:
            raise ValueError("the trace contains no requests to plan for")
        self.fleet = fleet
        self.goal = goal
        self.requests = list(requests)
        self.mean = MeanRequest.of(requests)
        self.horizon_s = 2.5 * (goal.ttft_s or 2.0)
        self._least, self.most = least, most
        self._on_simulated = on_simulated
        self._deployments: dict[Candidate, SimDeployment] = {}
        self.num_simulations = 0
        self.num_requests = 0

    def deployment(self, candidate: Candidate) -> SimDeployment:
        if candidate not in self._deployments:
            self._deployments[candidate] = deploy(candidate, self.fleet, self.goal)
        return self._deployments[candidate]

    def bound(self, candidate: Candidate) -> Bound:
        """Return the highest rate that the plan could serve, without a simulation."""
        return bound(self.deployment(candidate), self.mean, ttft_s=self.goal.ttft_s, tpot_s=self.goal.tpot_s)

    def count(self, rate: float) -> int:
        """Return the number of requests for a simulation at a rate."""
        return max(self._least, min(math.ceil(rate * self.horizon_s), self.most))

    def count_to_confirm(self, rate: float) -> int:
        """Return the number of requests for a confirmation, at least four times as long as a request may take."""
        longest_s = (self.goal.ttft_s or 2.0) + (self.goal.tpot_s or 0.1) * self.mean.num_output_tokens
        horizon_s = max(LONGER * self.horizon_s, 4 * longest_s)
        return max(LONGER * self._least, min(math.ceil(rate * horizon_s), LONGER * self.most))

    def simulate(self, candidate: Candidate, rate: float, count: int, *, early: bool = False) -> Simulation:
        """Simulate ``count`` requests at a rate; with ``early``, stop once they cannot reach the target."""
        goal = self.goal
        requests = at_rate(_repeated(self.requests, count), rate)
        allowed = (1 - TARGET) * count
        seen = missed = 0

        def misses_target(done: list[Job]) -> bool:
            nonlocal seen, missed
            missed += sum(not job.attains(goal.ttft_s, goal.tpot_s) for job in done[seen:])
            seen = len(done)
            return missed > allowed

        self.num_simulations += 1
        self.num_requests += count
        outcome = simulate(self.deployment(candidate), requests, give_up=misses_target if early else None)
        self._on_simulated()
        return outcome

    def evaluate(
        self, candidate: Candidate, *, at_least: float = 0.0, fraction: float = 1.0, precision: float = PRECISION
    ) -> Evaluation:
        """Find the goodput by bisection below the bound, assuming that attainment falls as the rate grows.

        The result is lowered until a long simulation sustains it. A plan that does not sustain ``at_least`` gets
        goodput 0.
        """
        try:
            limit = self.bound(candidate)

            def keeps(rate: float) -> bool:
                if rate > limit.rate:
                    return False
                count = max(int(self.count(rate) * fraction), 20)
                return self._is_attained(self.simulate(candidate, rate, count, early=True))

            if at_least and not (keeps(at_least) and self._confirm(candidate, at_least, fraction)[0]):
                return self._evaluation(candidate, 0.0, limit)
            rate = at_least or 0.9 * min(limit.rate, _MAX_RATE)
            low, high, step = at_least, math.inf, 1.12
            while math.isinf(high) and rate < _MAX_RATE:  # up to a rate that misses
                if rate != low and not keeps(rate):
                    high = rate
                else:
                    low, rate, step = rate, rate * step, step * 1.1
            step = 1.25
            while not low and high > 1e-3 * limit.rate:  # down to a rate that attains
                rate, step = high / step, step * step
                if keeps(rate):
                    low = rate
                else:
                    high = rate
            while low and high / low > 1 + precision:
                middle = math.sqrt(low * high)
                if keeps(middle):
                    low = middle
                else:
                    high = middle
            low = self._find_sustained(candidate, low, fraction)
        except NoWay as error:
            none = Bound(rate=0.0, bottleneck=Stage.PREFILL, loads={})
            return replace(self._evaluation(candidate, 0.0, none), objective=-math.inf, reason=str(error))
        return self._evaluation(candidate, low, limit)

    def _find_sustained(self, candidate: Candidate, rate: float, fraction: float) -> float:
        """Return the rate or a lower one that a long simulation sustains; 0.0 if none down to its half."""
        least, low, high = rate / 2, 0.0, math.inf
        while rate > least and high > _CONFIRM_PRECISION * low:
            sustains, outcome = self._confirm(candidate, rate, fraction)
            if sustains:
                if math.isinf(high):
                    return rate
                low = rate
            else:
                high = rate
            rate = math.sqrt(low * high) if low else max(min(0.97 * high, served_per_s(outcome)), 0.85 * high)
        return low

    def sustains(self, candidate: Candidate, rate: float) -> bool:
        """Return whether a long simulation keeps the target without growing queues. Raises NoWay."""
        return rate <= self.bound(candidate).rate and self._confirm(candidate, rate, 1.0)[0]

    def _confirm(self, candidate: Candidate, rate: float, fraction: float) -> tuple[bool, Simulation]:
        count = max(int(self.count_to_confirm(rate) * fraction), 100)
        outcome = self.simulate(candidate, _HEADROOM * rate, count, early=True)
        return self._is_attained(outcome) and is_steady(outcome.jobs), outcome

    def _is_attained(self, outcome: Simulation) -> bool:
        return outcome.attainment(self.goal.ttft_s, self.goal.tpot_s).value >= TARGET

    def _evaluation(self, candidate: Candidate, goodput: float, limit: Bound) -> Evaluation:
        cost = candidate.cost(self.fleet)
        return Evaluation(
            candidate=candidate,
            goodput=goodput,
            objective=goodput - self.goal.beta * cost,
            cost=cost,
            bound=limit,
        )


def deploy(candidate: Candidate, fleet: Fleet, goal: Goal) -> SimDeployment:
    """Return the simulated deployment of a plan. Raises NoWay if a model does not fit."""
    devices = candidate.devices(fleet)
    pool_of: dict[str, Pool] = {name: pool for pool, name in devices}
    host_of = {name: f"{pool.device}/{index // _PER_HOST}" for index, (pool, name) in enumerate(devices)}
    return build(
        candidate.topology,
        [name for _, name in devices],
        lambda name, width: pool_of[name].profile(width),
        batching=Batching(
            ttft_s=goal.ttft_s,
            tpot_s=goal.tpot_s,
            order=candidate.order,
            max_num_seqs=candidate.max_num_seqs,
            max_num_tokens=candidate.step_tokens(fleet),
        ),
        host_of=lambda name: host_of[name],
    )


def _repeated(requests: Sequence[SimRequest], count: int) -> list[SimRequest]:
    """Return ``count`` requests, repeating the trace with new names of media."""
    span = requests[-1].at_s - requests[0].at_s
    step = span / max(len(requests) - 1, 1)
    found: list[SimRequest] = []
    for number in range(count):
        lap, index = divmod(number, len(requests))
        one = requests[index]
        if lap:
            images = tuple((f"{name}+{lap}", pixels) for name, pixels in one.images)
            one = replace(one, at_s=one.at_s + lap * (span + step), images=images)
        found.append(one)
    return found


def under_way(jobs: Sequence[Job]) -> list[int]:
    """Return for each request the number of earlier ones that were still running at its arrival."""
    ends = sorted(math.inf if job.finish_s is None else job.finish_s for job in jobs)
    return [number - bisect_left(ends, job.sent_s) for number, job in enumerate(jobs)]


def is_steady(jobs: Sequence[Job]) -> bool:
    """Return whether the last third of the requests met no more others than the first third, except by chance.

    A mean of ``n`` independent open requests has a standard deviation of √n; two of those count as chance. The
    first requests, while the deployment fills up (1.5 mean durations), are ignored. A very short run passes.

    Args:
        jobs: jobs of a complete run, by arrival.
    """
    stays = [job.finish_s - job.sent_s for job in jobs if job.finish_s is not None]
    if not stays:
        return False
    full = bisect_left([job.sent_s for job in jobs], jobs[0].sent_s + 1.5 * fmean(stays))
    numbers = under_way(jobs)[full:]
    third = len(numbers) // 3
    if not third:
        return True
    before, behind = fmean(numbers[:third]), fmean(numbers[-third:])
    return behind <= before + 2 * math.sqrt(before) + 1


def served_per_s(outcome: Simulation) -> float:
    """Return requests finished per second, from a quarter of the run to its last arrival or its end."""
    until = min(outcome.seconds, outcome.jobs[-1].sent_s)
    since = until / 4
    ended = sum(1 for job in outcome.jobs if job.finish_s is not None and since < job.finish_s <= until)
    return ended / (until - since) if until > since else 0.0
