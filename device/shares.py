"""Shares of a device: what is possible, and what a launcher sets before a process starts. No torch in here."""

from __future__ import annotations

import os
from pathlib import Path

MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def check_share(share: float, start: float) -> None:
    """Raises ValueError unless ``start`` and ``share`` lie within the device, both as fractions of 1."""
    # Thirds written as decimals may add up to a hair above 1.
    if not (0 < share <= 1 and start >= 0 and start + share <= 1 + 1e-6):
        raise ValueError(f"share {share} from {start} on: both are fractions of the device and end at 1 at most")


def share_environment(share: float) -> dict[str, str]:
    """Return the variables that a launcher sets for a process that shall have this share of a GPU.

    The mapping is empty where no MPS server runs: the variable would have no effect. Raises ValueError as
    ``apply_share`` does.
    """
    check_share(share, 0.0)
    return {MPS_SHARE: f"{share * 100:g}"} if mps_is_running() else {}


def mps_is_running() -> bool:
    """Whether MPS's daemon runs: it makes a directory at its start and removes it at its end."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).is_dir()
