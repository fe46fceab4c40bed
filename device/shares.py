"""Check shares of a device. Does not import torch."""

from __future__ import annotations


def check_share(share: float, start: float) -> None:
    """Raise ValueError unless ``start`` and ``share`` lie within the device, both as fractions of 1."""
    # Thirds written as decimals may add up to slightly above 1.
    if not (0 < share <= 1 and start >= 0 and start + share <= 1 + 1e-6):
        raise ValueError(f"share {share} from {start}: both are fractions of the device, with a sum of at most 1")
