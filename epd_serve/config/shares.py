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
        if instance.name not in chosen:
            group = [other for other in instances if other.name in (instance.name, *instance.shares_device_with)]
            chosen |= _shares_of(group, wishes)
    return chosen


def _shares_of(group: Sequence[InstancePlacement], wishes: Mapping[str, float | None]) -> dict[str, DeviceShare]:
    wished = {instance.name: wishes[str(instance.role)] for instance in group}
    fixed = {name: wish for name, wish in wished.items() if wish is not None}
    if not fixed:
        return {}
    taken = sum(fixed.values())
    listed = ", ".join(f"{name} {share:g}" for name, share in fixed.items())
    if taken > 1 + _ROUNDING:
        raise ValueError(f"shares of one device sum to {taken:g} ({listed}); the sum must be at most 1")
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


def memory_shares(instances: Sequence[InstancePlacement], wishes: Mapping[str, float | None]) -> dict[str, float]:
    """Return each instance's fraction of its device's memory, by name; omit instances with a device of their own.

    Fractions are known before the start, so that instances need not wait for each other's weights. Configured
    fractions hold; the other instances divide the rest of 0.9, a language model getting five times a tower's.

    Args:
        instances: instances without a share.
        wishes: configured fraction by role; None: not configured.

    Raises ValueError for fractions of one device that sum to more than 1 or leave nothing to the others.
    """
    chosen: dict[str, float] = {}
    on_devices: dict[str, list[InstancePlacement]] = {}
    for one in instances:
        if one.devices[0] != CPU:
            on_devices.setdefault(one.devices[0], []).append(one)
    for device, group in on_devices.items():
        parts = {one.name: wish for one in group if (wish := wishes[str(one.role)]) is not None}
        weights = {
            one.name: _LANGUAGE_WEIGHT if one.role.has_language_model else 1
            for one in group
            if one.name not in parts
        }
        rest, listed = _MEMORY - sum(parts.values()), ", ".join(f"{name} {part:g}" for name, part in parts.items())
        if sum(parts.values()) > 1 + _ROUNDING:
            raise ValueError(f"memory_share: the parts of {device} sum to more than 1 ({listed}); lower them")
        if weights and rest < _ROUNDING:
            raise ValueError(
                f"memory_share: {listed} of {device} leave nothing to {', '.join(weights)}; lower them"
            )
        if len(group) > 1:
            parts |= {name: round(rest * weight / sum(weights.values()), 3) for name, weight in weights.items()}
        chosen |= parts
    return chosen
