"""The part of a device to which each of the instances on it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.topology import InstancePlacement

ShareWish = float | Literal["auto"] | None

#: Stages that slow each other by no more than this need no partition: sharing all of the device wastes less of it.
HARMLESS = 0.2
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShare:
    """``share`` of a device from ``start`` on, both as fractions of 1."""

    share: float
    start: float


def device_shares(
    instances: Sequence[InstancePlacement],
    wishes: Mapping[str, ShareWish],
    matrix: InterferenceMatrix | None = None,
) -> dict[str, DeviceShare]:
    """The shares of instances by name; those without a limit are left out.

    Instances share a device where the notation has them in one pair of parentheses. If none of them wishes
    anything there are no limits. Else numbers are taken as they stand, and the rest is parted equally among the
    others. If ``auto`` is all that is wished and the matrix says that the stages on the device hardly slow each
    other (:data:`HARMLESS`), there are no limits either.

    Args:
        wishes: by role.

    Raises ValueError for shares of one device that sum to more than 1 or leave nothing to the others.
    """
    chosen: dict[str, DeviceShare] = {}
    for instance in instances:
        if instance.name not in chosen:
            group = [other for other in instances if other.name in (instance.name, *instance.shares_device_with)]
            chosen |= _shares_of(group, wishes, matrix)
    return chosen


def _shares_of(
    group: Sequence[InstancePlacement], wishes: Mapping[str, ShareWish], matrix: InterferenceMatrix | None
) -> dict[str, DeviceShare]:
    wished = {instance.name: wishes[str(instance.role)] for instance in group}
    fixed = {name: wish for name, wish in wished.items() if isinstance(wish, float)}
    if all(wish is None for wish in wished.values()) or (not fixed and _is_harmless(group, matrix)):
        return {}
    taken = sum(fixed.values())
    listed = ", ".join(f"{name} {share:g}" for name, share in fixed.items())
    if taken > 1 + _ROUNDING:
        raise ValueError(f"shares of one device sum to {taken:g} ({listed}); together they are 1 at most")
    others = [name for name in wished if name not in fixed]
    if others and taken > 1 - _ROUNDING:
        raise ValueError(f"shares of one device ({listed}) leave nothing to {', '.join(others)}; lower them")
    shares: dict[str, DeviceShare] = {}
    start = 0.0
    for name in wished:
        share = fixed.get(name, (1 - taken) / max(len(others), 1))
        shares[name] = DeviceShare(share=share, start=max(0.0, min(start, 1 - share)))
        start += share
    return shares


def _is_harmless(group: Sequence[InstancePlacement], matrix: InterferenceMatrix | None) -> bool:
    if matrix is None:
        return False
    try:
        return all(
            max(matrix.increase_of(a, b), matrix.increase_of(b, a)) <= HARMLESS
            for one, other in combinations(group, 2)
            for a in one.role.stages
            for b in other.role.stages
        )
    except KeyError:  # the matrix lacks a pair
        return False
