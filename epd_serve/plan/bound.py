"""The highest request rate that a plan could serve, without simulating it, and the stage that limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from epd_serve.cost.profile import Profile
from epd_serve.sim.request import SimRequest
from epd_serve.sim.simulator import SimDeployment
from epd_serve.sim.spec import SimInstanceSpec
from epd_serve.types import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanRequest:
    """The mean request of a workload; ``image_pixels`` are those of one image."""

    num_images: float
    image_pixels: float
    num_text_tokens: float
    num_output_tokens: float

    @classmethod
    def of(cls, requests: Sequence[SimRequest]) -> MeanRequest:
        """Take the means of ``requests``. Equal images count once: they are encoded once."""
        distinct = {name: pixels for one in requests for name, pixels in one.images}
        num = len(requests)
        return cls(
            num_images=len(distinct) / num,
            image_pixels=fmean(distinct.values()) if distinct else 0.0,
            num_text_tokens=fmean(one.num_text_tokens for one in requests),
            num_output_tokens=fmean(one.num_output_tokens for one in requests),
        )

    def num_prompt_tokens(self, profile: Profile) -> float:
        image = profile.image_tokens(round(self.image_pixels)) if self.num_images else 0
        return self.num_images * image + self.num_text_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The limit of a plan.

    Attributes:
        rate: requests per second at which the first device is busy all the time.
        bottleneck: the stage that keeps that device busiest.
        loads: seconds of each stage per request, on one instance that does nothing else.
        shares: seconds of each stage per request on the device that does the most of it.
    """

    rate: float
    bottleneck: Stage
    loads: dict[Stage, float]
    shares: dict[Stage, float]


def stage_seconds(
    spec: SimInstanceSpec, mean: MeanRequest, tpot_s: float | None, ttft_s: float | None, stage: Stage
) -> float:
    """Seconds of one stage of a request, at an instance whose batches are as full as its limits allow.

    The steps are those of algorithm 2, lines 6 to 11.
    """
    profile = spec.profile
    if stage is Stage.ENCODE:
        if not mean.num_images or not profile.encode:
            return 0.0
        pixels = round(mean.image_pixels)
        count = max(1, spec.batching.image_budget_pixels // max(pixels, 1))
        while count > 1 and ttft_s is not None and profile.encode_s([pixels] * count) > ttft_s / 2:
            count //= 2
        return mean.num_images * profile.encode_s([pixels] * count) / count
    num_tokens = mean.num_prompt_tokens(profile)
    if stage is Stage.PREFILL:
        together = max(1, int(spec.batching.max_num_tokens // max(num_tokens, 1)))
        seconds = profile.step_s(num_tokens * together, together, 0, together * num_tokens**2)
        return seconds / together
    steps = max(mean.num_output_tokens - 1, 0.0)
    if not steps:
        return 0.0
    context = num_tokens + mean.num_output_tokens / 2
    room = max(int(spec.num_blocks * spec.block_size / max(context, 1)), 1)
    batch = max(min(spec.batching.max_num_seqs, room), 1)
    while batch > 1 and tpot_s is not None and profile.step_s(batch, batch, batch * context) > tpot_s:
        batch = max(int(batch * 0.9), batch // 2) if batch > 2 else 1
    return steps * profile.step_s(batch, batch, batch * context) / batch


def bound(deployment: SimDeployment, mean: MeanRequest, *, ttft_s: float | None, tpot_s: float | None) -> Bound:
    """The bound of a deployment: each stage's work is divided among its instances in proportion to their speed."""
    busy: dict[str, dict[Stage, float]] = {}
    loads: dict[Stage, float] = {}
    for stage in Stage:
        covering = [one for one in deployment.instances if stage in one.role.stages]
        if stage is Stage.DECODE:  # what prefills and decodes keeps its own prompts
            covering = [one for one in covering if one.role.prefills] or covering
        seconds = {one.name: stage_seconds(one, mean, tpot_s, ttft_s, stage) for one in covering}
        speed = sum(1 / value for value in seconds.values() if value > 0)
        if not speed:
            continue
        loads[stage] = min(seconds.values())
        for one in covering:
            device = busy.setdefault(f"{one.host}/{one.device}", dict.fromkeys(Stage, 0.0))
            device[stage] += 1 / speed
    totals = {device: _together(stages, deployment, device) for device, stages in busy.items()}
    worst = max(totals, key=lambda device: totals[device])
    return Bound(
        rate=1 / totals[worst] if totals[worst] > 0 else float("inf"),
        bottleneck=max(busy[worst], key=lambda stage: busy[worst][stage]),
        loads=loads,
        shares={stage: max(device[stage] for device in busy.values()) for stage in Stage},
    )


def _together(stages: dict[Stage, float], deployment: SimDeployment, device: str) -> float:
    """Seconds of a device's stages together.

    Tower and language model overlap except for the resources that both need; prefill and decode do not overlap.
    """
    language = stages[Stage.PREFILL] + stages[Stage.DECODE]
    tower = stages[Stage.ENCODE]
    here = [one for one in deployment.instances if f"{one.host}/{one.device}" == device]
    if all(one.dual_stream for one in here) and here[0].profile.kind == "analytic":
        profile = here[0].profile
        compute = profile.compute_share * (tower + stages[Stage.PREFILL]) + 0.1 * stages[Stage.DECODE]
        return max(language, tower, compute)
    return language + tower
