"""A simulated instance: its role, its device and profile, and the options that a deployment gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from epd_serve.config.sections import BatchingOrder
from epd_serve.cost.profile import Profile
from epd_serve.sched.schedule import Budget
from epd_serve.sched.step_cost import StepCost, StepPace, latency_limit_s, search_budget
from epd_serve.sched.step_sizes import Limits, Sizes, StepShape, size_steps
from epd_serve.types import Role

#: Blocks of a pool beyond which more cannot change anything in a simulation of some thousand requests.
_MOST_BLOCKS = 1 << 17
#: Tokens of a sequence at most, for the steps whose times size the others: profiles do not know the model's.
_LONGEST = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """The options of a deployment file that shape steps; ``slo`` in seconds, None: no limit."""

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
        host, device: instances of one device slow each other down.
        assists: an encoder that takes text while the others' queue is long; its encodes go first.
        runs_ahead: its next step is planned when one begins.
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
        """Blocks of a sequence's recurrent state, beside those of its tokens."""
        return self.profile.state_blocks(self.block_size)

    @property
    def limit_s(self) -> float | None:
        """LATENCY_max of its steps and encodes."""
        batching = self.batching
        return latency_limit_s(self.role, ttft_s=batching.ttft_s, tpot_s=batching.tpot_s)


def size_steps_of(spec: SimInstanceSpec) -> tuple[Budget, StepCost]:
    """The budget of a step as an instance finds it at its start (TriInfer, algorithm 1), and the cost of steps,
    from the profile's times in place of measured ones. A limit that cannot be met leaves the smallest batch."""
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
            max_model_len=_LONGEST,
        ),
    )
    budget = sizes.budget
    if spec.limit_s is not None:  # what one instance learns is not another's
        budget = replace(budget, pace=StepPace(sizes.cost, spec.limit_s))
    return budget, sizes.cost


class _Known:
    """A profile, the same as itself alone."""

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
    """The largest batch of square images of 448 pixels within the limit, in pixels."""
    limit_s, area = spec.limit_s, 448 * 448
    if limit_s is None or not spec.profile.encode:
        return spec.batching.image_budget_pixels
    most = max(1, spec.batching.image_budget_pixels // area)
    size, _ = search_budget(lambda count: spec.profile.encode_s([area] * count), limit_s, 1, most)
    return area * size


def with_memory(spec: SimInstanceSpec, *, share: float, beside_tower: bool = False) -> SimInstanceSpec:
    """The same with as many blocks as its share of the device's memory holds; 0 where the weights do not fit.

    Args:
        beside_tower: whether an instance that encodes shares the device.
    """
    if not spec.role.has_language_model:
        return replace(spec, num_blocks=2)
    profile = spec.profile
    blocks = profile.num_blocks(spec.block_size, share=share, holds_tower=spec.role.encodes or beside_tower)
    return replace(spec, num_blocks=min(blocks, _MOST_BLOCKS))
