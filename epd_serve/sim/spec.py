"""The specification of a simulated deployment: its instances with their devices, profiles and batching options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from epd_serve.config.sections import BatchingOrder
from epd_serve.cost.profile import Profile
from epd_serve.cost.stages import MAX_BATCH_PIXELS
from epd_serve.sched.schedule import Budget
from epd_serve.sched.step_cost import StepCost, StepPace, latency_limit_s, search_budget
from epd_serve.sched.step_sizes import Limits, Sizes, StepShape, size_steps
from epd_serve.topology import Topology, place
from epd_serve.topology.placement import CPU
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
    order: BatchingOrder = "fcfs"
    ttft_s: float | None = None
    tpot_s: float | None = None


DEFAULT = Batching()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimInstanceSpec:
    """One instance.

    Attributes:
        host, device: instances on one device slow each other down.
        runs_ahead: it plans the next step when a step begins.
    """

    name: str
    role: Role
    profile: Profile
    device: str
    host: str = "host0"
    num_blocks: int
    block_size: int = 16
    batching: Batching = DEFAULT
    runs_ahead: bool = False

    @property
    def state_blocks(self) -> int:
        """Blocks for a sequence's recurrent state, in addition to its tokens'."""
        return self.profile.state_blocks(self.block_size)

    @property
    def limit_s(self) -> float | None:
        """LATENCY_max of steps and encodes (EPD-Serve)."""
        return latency_limit_s(self.role, ttft_s=self.batching.ttft_s, tpot_s=self.batching.tpot_s)


class NoWay(ValueError):
    """A model does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimDeployment:
    """Instances behind one gateway."""

    instances: tuple[SimInstanceSpec, ...]


def build(
    topology: Topology,
    devices: Sequence[str],
    profile_of: Callable[[str, int], Profile],
    *,
    batching: Batching = DEFAULT,
    host_of: Callable[[str], str] = lambda device: "host0",
    block_size: int | None = None,
    num_blocks: int | None = None,
) -> SimDeployment:
    """Place instances on devices like ``epd-serve up``.

    Language models on one device share its memory equally, next to the tower. On a CPU, instances have their own
    cores unless the notation co-locates them.

    Args:
        profile_of: returns the profile for a device name and a tensor-parallel width.

    Raises NoWay if an instance has no room for KV next to the weights.
    """
    placed = place(topology, devices)
    specs: list[SimInstanceSpec] = []
    for one in placed:
        device = one.devices[0]
        profile = profile_of(device, one.tensor_parallel)
        neighbours = [other for other in placed if other.name in (one.name, *one.shares_device_with)]
        size = block_size or (128 if profile.device.startswith(("npu", "ascend")) else 16)
        blocks = num_blocks or 2
        if num_blocks is None and one.role.has_language_model:
            num_models = sum(other.role.has_language_model for other in neighbours)
            has_tower = any(other.role.encodes for other in neighbours)
            blocks = min(profile.num_blocks(size, share=1 / num_models, holds_tower=has_tower), _MAX_BLOCKS)
        specs.append(
            SimInstanceSpec(
                name=one.name,
                role=one.role,
                profile=profile,
                device=f"{CPU}:{min(other.name for other in neighbours)}" if device == CPU else device,
                host=host_of(device),
                num_blocks=blocks,
                block_size=size,
                batching=batching,
                runs_ahead=device != CPU,
            )
        )
        if one.role.has_language_model and blocks < 8 + specs[-1].state_blocks:
            raise NoWay(f"{one.name}: the weights leave no room for KV on {device}")
    return SimDeployment(instances=tuple(specs))


def size_steps_of(spec: SimInstanceSpec) -> tuple[Budget, StepCost]:
    """Return a step's budget and cost as an instance finds them at its start (TriInfer, algorithm 1).

    Times come from the profile. If the latency limit cannot be met, the smallest batch remains.
    """
    batching, limit_s = spec.batching, spec.limit_s
    if not spec.role.has_language_model or (limit_s is None and batching.order != "slack"):
        return Budget(max_num_tokens=batching.max_num_tokens, max_num_seqs=batching.max_num_seqs), StepCost()
    limits = Limits(
        latency_s=limit_s,
        decodes=spec.role.decodes,
        max_num_tokens=batching.max_num_tokens,
        max_num_seqs=batching.max_num_seqs,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_model_len=_MAX_TOKENS,
    )
    sizes = _size_steps(spec.profile, limits)
    if limit_s is None:
        return sizes.budget, sizes.cost
    return replace(sizes.budget, pace=StepPace(sizes.cost, limit_s)), sizes.cost  # each learns its own pace


@lru_cache(maxsize=256)
def _size_steps(profile: Profile, limits: Limits) -> Sizes:
    def seconds(shape: StepShape) -> float:
        work = shape.work
        return profile.step_s(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)

    return size_steps(seconds, limits)


def find_image_budget(spec: SimInstanceSpec) -> int:
    """Return the largest batch of 448-pixel square images within the limit, in pixels."""
    limit_s, area = spec.limit_s, 448 * 448
    if limit_s is None or not spec.profile.encode:
        return MAX_BATCH_PIXELS
    most = max(1, MAX_BATCH_PIXELS // area)
    size, _ = search_budget(lambda count: spec.profile.encode_s([area] * count), limit_s, most)
    return area * size
