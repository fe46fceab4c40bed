"""The specification of a simulated instance: role, device, profile and batching options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from epd_serve.config.sections import BatchingOrder
from epd_serve.cost.profile import Profile
from epd_serve.sched.schedule import Budget
from epd_serve.sched.step_cost import StepCost, StepPace, latency_limit_s, search_budget
from epd_serve.sched.step_sizes import Limits, Sizes, StepShape, size_steps
from epd_serve.types import Role

#: More blocks make no difference in a simulation of a few thousand requests.
_MAX_BLOCKS = 1 << 17
#: Longest sequence for sizing steps; profiles lack the model's limit.
_MAX_TOKENS = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """Batching options of a deployment file; SLO in seconds, None: no limit."""

    max_num_tokens: int = 2048
    max_num_seqs: int = 64
    image_budget_pixels: int = 8 << 20
    order: BatchingOrder = "fcfs"
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimInstanceSpec:
    """One instance.

    Attributes:
        host, device: instances on one device slow each other down.
        assists: an encoder that takes text requests while the others' queue is long; its encodes go first.
        runs_ahead: it plans the next step when a step begins.
    """

    name: str
    role: Role
    profile: Profile
    device: str
    host: str = "host0"
    num_blocks: int
    block_size: int = 16
    batching: Batching = Batching()
    runs_ahead: bool = False
    assists: bool = False

    @property
    def state_blocks(self) -> int:
        """Blocks for a sequence's recurrent state, in addition to its tokens'."""
        return self.profile.state_blocks(self.block_size)

    @property
    def limit_s(self) -> float | None:
        """LATENCY_max of steps and encodes (EPD-Serve)."""
        batching = self.batching
        return latency_limit_s(self.role, ttft_s=batching.ttft_s, tpot_s=batching.tpot_s)


def size_steps_of(spec: SimInstanceSpec) -> tuple[Budget, StepCost]:
    """Return a step's budget and cost as an instance finds them at its start (TriInfer, algorithm 1).

    Times come from the profile. If the latency limit cannot be met, the smallest batch remains.
    """
    batching = spec.batching
    if spec.limit_s is None and batching.order != "slack":
        return Budget(max_num_tokens=batching.max_num_tokens, max_num_seqs=batching.max_num_seqs), StepCost()
    sizes = _sized(
        _Known(spec.profile),
        Limits(
            latency_s=spec.limit_s,
            decodes=spec.role.decodes,
            max_num_tokens=batching.max_num_tokens,
            max_num_seqs=batching.max_num_seqs,
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            max_model_len=_MAX_TOKENS,
        ),
    )
    budget = sizes.budget
    if spec.limit_s is not None:  # each instance learns its own pace
        budget = replace(budget, pace=StepPace(sizes.cost, spec.limit_s))
    return budget, sizes.cost


class _Known:
    """A profile hashed by identity."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.profile is other.profile

    def __hash__(self) -> int:
        return id(self.profile)


@lru_cache(maxsize=256)
def _sized(known: _Known, limits: Limits) -> Sizes:
    def seconds(shape: StepShape) -> float:
        work = shape.work
        return known.profile.step_s(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)

    return size_steps(seconds, limits)


def find_image_budget(spec: SimInstanceSpec) -> int:
    """Return the largest batch of 448-pixel square images within the limit, in pixels."""
    limit_s, area = spec.limit_s, 448 * 448
    if limit_s is None or not spec.profile.encode:
        return spec.batching.image_budget_pixels
    most = max(1, spec.batching.image_budget_pixels // area)
    size, _ = search_budget(lambda count: spec.profile.encode_s([area] * count), limit_s, most)
    return area * size


def with_memory(spec: SimInstanceSpec, *, share: float, beside_tower: bool = False) -> SimInstanceSpec:
    """Return the instance with the KV blocks that its share of the device's memory holds; 0 without room.

    Args:
        beside_tower: whether an encoding instance shares the device.
    """
    if not spec.role.has_language_model:
        return replace(spec, num_blocks=2)
    profile = spec.profile
    blocks = profile.num_blocks(spec.block_size, share=share, holds_tower=spec.role.encodes or beside_tower)
    return replace(spec, num_blocks=min(blocks, _MAX_BLOCKS))
