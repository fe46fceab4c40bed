"""The controller's input: each instance's seconds of pending work, taken from the instance table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_serve.cost.stages import PRIOR_DECODE, PRIOR_ENCODE, PRIOR_PREFILL
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Role, Stage, StageRate

#: Of a KV pool: with less free, what waits to be decoded waits for room.
_FULL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLoad:
    """One instance at one moment.

    Attributes:
        is_serving: it takes new work. Instances that drain, rebuild or are lost do not.
        queue_s: estimated seconds of pending work of each of its stages; of decoding only the sequences that wait
            for a place in a step, because the rest goes on side by side.
        num_decoding: sequences in its steps.
        step: a decode step's seconds by sequences.
        output_tokens: mean tokens of an answer.
        kv_used: part of its KV blocks that is taken.
        sent: work that was sent there so far: seconds of encoding, sequences to decode.
    """

    name: str
    role: Role
    is_serving: bool = True
    queue_s: Mapping[Stage, float] = field(default_factory=dict)
    num_decoding: float = 0.0
    step: StageRate = StageRate(0.02, 1e-3)  # noqa: RUF009 - it is frozen
    output_tokens: float = 128.0
    kv_used: float = 0.0
    sent: Mapping[Stage, float] = field(default_factory=dict)

    def waits(self, stage: Stage) -> float:
        """Seconds of pending work of one stage."""
        return self.queue_s.get(stage, 0.0)


def instance_loads(table: InstanceTable) -> list[InstanceLoad]:
    """Every instance whose role is known, in the order of the deployment.

    Work of a stage whose rate nobody has measured yet counts as none: its time would be a guess.

    A prompt is computed once a decode instance has a place for it. Until then it is expected there, and counts as
    waiting where it is to be prefilled. The prompts that wait for such places count in the decode instance's
    queue, and the tokens that wait for their images in the encoders' queue.
    """
    records = [record for record in table if record.role is not None]
    prompts = sum(
        one.load.num_running + one.load.num_waiting
        for one in records
        if Stage.PREFILL in one.stages and Stage.DECODE not in one.stages
    )
    encodes = sum(one.load.num_waiting_encodes for one in records)
    refused = sum(one.load.num_refused for one in records)
    has_images = 1 - _part_without_images(records, encodes)
    held_up = min(max(sum(one.load.num_expected for one in records) - prompts - encodes, 0), refused)
    return [
        _load_of(
            record,
            held_up=held_up * record.load.num_refused / refused if refused else 0.0,
            own=prompts / (prompts + held_up) if held_up else 1.0,
            has_images=has_images,
        )
        for record in records
    ]


def _part_without_images(records: Sequence[InstanceRecord], num_encodes: int) -> float:
    """The part of the tokens to be prefilled that belongs to images which are not encoded yet.

    It is estimated by their pixels, but is at most that of as many whole prompts as there are encodes: not every
    model family has tokens for an image by its size.
    """
    prefills = [one for one in records if Stage.PREFILL in one.stages]
    num_tokens = sum(one.pending.num_tokens for one in prefills)
    num_prompts = sum(one.load.num_running + one.load.num_waiting for one in prefills)
    if not num_tokens or not num_prompts:
        return 0.0
    per_pixel = (
        max(one.info.tokens_per_pixel for one in prefills if one.info is not None) or PRIOR_TOKENS_PER_PIXEL
    )
    by_pixels = sum(one.pending.num_pixels for one in records) * per_pixel / num_tokens
    return min(by_pixels, num_encodes / num_prompts, 1.0)


def _places(record: InstanceRecord) -> float:
    """The number of further sequences that it could decode now."""
    assert record.info is not None
    most = record.info.budgets.get("max_num_seqs", math.inf)
    is_full = record.load.num_refused or _used(record) > _FULL
    return 0.0 if is_full else max(most - record.load.num_running, 0.0)


def _used(record: InstanceRecord) -> float:
    load = record.load
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


def _load_of(record: InstanceRecord, *, held_up: float, own: float, has_images: float) -> InstanceLoad:
    """Estimate one instance's pending work.

    Args:
        held_up: prompts that wait for a place here.
        own: the part of the prompts at prefill instances that waits for no place elsewhere.
        has_images: the part of all prompts that does not wait for images.
    """
    load, costs, role = record.load, record.costs, record.role
    assert role is not None
    queue_s: dict[Stage, float] = {}
    if role.encodes and costs.encode is not PRIOR_ENCODE:
        queue_s[Stage.ENCODE] = record.encode_s
    if role.prefills and costs.prefill is not PRIOR_PREFILL:
        queue_s[Stage.PREFILL] = record.prefill_s * has_images * (1.0 if role.decodes else own)
    decodes = role.decodes and costs.decode is not PRIOR_DECODE
    num_decoding = float(load.num_running) if decodes else 0.0
    if decodes:
        waiting = held_up + (0.0 if role.prefills else max(load.num_waiting - _places(record), 0.0))
        batch = max(num_decoding, 1.0)
        queue_s[Stage.DECODE] = waiting * costs.mean_output_tokens * costs.step_s(batch) / batch
    base_s = costs.step_s(0)
    return InstanceLoad(
        name=record.name,
        role=role,
        is_serving=record.state == "up",
        queue_s=queue_s,
        num_decoding=num_decoding,
        step=StageRate(base_s, costs.step_s(1) - base_s),
        output_tokens=costs.mean_output_tokens,
        kv_used=_used(record),
        sent={Stage.ENCODE: record.sent_encode_s, Stage.DECODE: record.sent_sequences},
    )


def to_json(instances: Sequence[InstanceLoad]) -> list[dict[str, Any]]:
    """Instances as the admin API has them (``GET /load``)."""
    return [{**msgspec.to_builtins(one), "role": str(one.role)} for one in instances]


def from_json(instances: Sequence[Mapping[str, Any]]) -> list[InstanceLoad]:
    """The reverse of :func:`to_json`. Raises ValueError for anything else."""
    return [
        msgspec.convert({**one, "role": {"stages": list(str(one.get("role")))}}, InstanceLoad) for one in instances
    ]
