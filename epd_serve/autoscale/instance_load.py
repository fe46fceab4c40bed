"""The controller's input: pending work of each instance, from the instance table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_serve.cost.stages import PRIOR_DECODE, PRIOR_ENCODE, PRIOR_PREFILL
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Role, Stage, StageRate

#: KV usage above which waiting sequences wait for room.
_FULL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLoad:
    """One instance at one moment.

    Attributes:
        is_serving: it accepts work; False while it drains, rebuilds or is lost.
        queue_s: estimated seconds of pending work per stage; for decode only sequences that wait for a place,
            because the others run concurrently.
        num_decoding: sequences in its steps.
        step: duration of a decode step by sequences.
        output_tokens: mean tokens of an answer.
        kv_used: share of its KV blocks in use.
        sent: work sent there so far: seconds of encoding, sequences to decode.
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


def instance_loads(table: InstanceTable) -> list[InstanceLoad]:
    """Return every instance with a known role, in the order of the deployment.

    Work of a stage without a measured rate counts as none, because its time would be a guess. A prompt waits at P
    until D has a place for it: such prompts count in D's queue, and tokens that wait for their images in E's.
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
    """Return the share of waiting prefill tokens that belong to images not encoded yet.

    It is estimated from pixels, limited to one prompt per encode, because some families have a fixed number of
    tokens per image.
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


def _load_of(record: InstanceRecord, *, held_up: float, own: float, has_images: float) -> InstanceLoad:
    """Estimate one instance's pending work.

    Args:
        held_up: prompts that wait for a place here.
        own: share of prompts at prefill instances that do not wait for a place at D.
        has_images: share of prompt tokens that do not wait for images.
    """
    load, costs, role = record.load, record.costs, record.role
    assert role is not None and record.info is not None
    kv_used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    places = max(record.info.budgets.get("max_num_seqs", math.inf) - load.num_running, 0.0)
    if load.num_refused or kv_used > _FULL:
        places = 0.0
    queue_s: dict[Stage, float] = {}
    if role.encodes and costs.encode is not PRIOR_ENCODE:
        queue_s[Stage.ENCODE] = record.encode_s
    if role.prefills and costs.prefill is not PRIOR_PREFILL:
        queue_s[Stage.PREFILL] = record.prefill_s * has_images * (1.0 if role.decodes else own)
    decodes = role.decodes and costs.decode is not PRIOR_DECODE
    num_decoding = float(load.num_running) if decodes else 0.0
    if decodes:
        waiting = held_up + (0.0 if role.prefills else max(load.num_waiting - places, 0.0))
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
        kv_used=kv_used,
        sent={Stage.ENCODE: record.sent_encode_s, Stage.DECODE: record.sent_sequences},
    )


def to_json(instances: Sequence[InstanceLoad]) -> list[dict[str, Any]]:
    """Convert instances for the admin API (``GET /load``)."""
    return [{**msgspec.to_builtins(one), "role": str(one.role)} for one in instances]


def from_json(instances: Sequence[Mapping[str, Any]]) -> list[InstanceLoad]:
    """Invert :func:`to_json`. Raises ValueError for invalid data."""
    return [
        msgspec.convert({**one, "role": {"stages": list(str(one.get("role")))}}, InstanceLoad) for one in instances
    ]
