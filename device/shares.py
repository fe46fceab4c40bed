"""Shares of a device: the possible ones. No torch in here."""

from __future__ import annotations


def check_share(share: float, start: float) -> None:
    """Raises ValueError unless ``start`` and ``share`` lie within the device, both as fractions of 1."""
    # Thirds written as decimals may add up to a hair above 1.
    if not (0 < share <= 1 and start >= 0 and start + share <= 1 + 1e-6):
        raise ValueError(f"share {share} from {start} on: both are fractions of the device and end at 1 at most")
