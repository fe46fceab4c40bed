"""Shares of a device for each instance on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU

_ROUNDING = 1e-6
#: Fraction of an accelerator's memory for all its instances; their contexts need the rest.
_MEMORY = 0.9
#: Ratio of a language model's memory to a tower's, because it holds the KV.
_LANGUAGE_WEIGHT = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShare:
    """A ``share`` of a device from ``start`` on, both as fractions of 1."""

    share: float
    start: float


def device_shares(
    instances: Sequence[InstancePlacement], wishes: Mapping[str, float | None]
) -> dict[str, DeviceShare]:
    """Return the shares of instances by name; omit instances without a limit.

    Instances in one pair of parentheses share a device. Without a share in ``wishes`` for any of them, all are
    unlimited. Otherwise the named shares hold, and the others divide the rest equally.

    Args:
        wishes: share by role; None: none named.

    Raises ValueError for shares of one device that sum to more than 1 or leave nothing to the others.
    """
    chosen: dict[str, DeviceShare] = {}
    for instance in instances:
        group = [one for one in instances if one.name in (instance.name, *instance.shares_device_with)]
        if instance.name in chosen or all(wishes[str(one.role)] is None for one in group):
            continue
        start = 0.0
        for name, share in _divide("share", group, wishes, {one.name: 1 for one in group}, whole=1.0).items():
            chosen[name] = DeviceShare(share=share, start=max(0.0, min(start, 1 - share)))
            start += share
    return chosen


def memory_shares(instances: Sequence[InstancePlacement], wishes: Mapping[str, float | None]) -> dict[str, float]:
    """Return each instance's fraction of its device's memory, by name; omit instances with a device of their own.

    Fractions are known before the start, so that instances need not wait for each other's weights. Configured
    fractions hold; the other instances divide the rest of 0.9, a language model getting five times a tower's.

    Args:
        instances: instances without a share.
        wishes: configured fraction by role; None: not configured.

    Raises ValueError for fractions of one device that sum to more than 1 or leave nothing to the others.
    """
    groups: dict[str, list[InstancePlacement]] = {}
    for one in instances:
        if one.devices[0] != CPU:
            groups.setdefault(one.devices[0], []).append(one)
    chosen: dict[str, float] = {}
    for group in groups.values():
        weights = {one.name: _LANGUAGE_WEIGHT if one.role.has_language_model else 1 for one in group}
        if len(group) > 1 or wishes[str(group[0].role)] is not None:
            parts = _divide("memory_share", group, wishes, weights, whole=_MEMORY)
            chosen |= {name: round(part, 3) for name, part in parts.items()}
    return chosen


def _divide(
    key: str,
    group: Sequence[InstancePlacement],
    wishes: Mapping[str, float | None],
    weights: Mapping[str, int],
    *,
    whole: float,
) -> dict[str, float]:
    """Return the wished parts of a device, and the rest of ``whole`` divided by weight. Raises ValueError."""
    fixed = {one.name: wish for one in group if (wish := wishes[str(one.role)]) is not None}
    others = [one.name for one in group if one.name not in fixed]
    taken = sum(fixed.values())
    listed = f"{key}: {', '.join(f'{name} {part:g}' for name, part in fixed.items())} of {group[0].devices[0]}"
    if taken > 1 + _ROUNDING:
        raise ValueError(f"{listed} sum to {taken:g}; the sum must be at most 1")
    if others and whole - taken < _ROUNDING:
        raise ValueError(f"{listed} leave nothing to {', '.join(others)}; lower them")
    total = sum(weights[name] for name in others)
    return {
        one.name: fixed[one.name] if one.name in fixed else (whole - taken) * weights[one.name] / total
        for one in group
    }
