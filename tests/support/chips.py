"""Chips for tests: what is read too early there is no number, and memory ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chip.chip  # noqa: F401 - makes its device known
import pytest

from device.registry import get_device

CHIP = "chip:12"
#: Of a process that imports :mod:`chip`.
_HERE = Path(__file__)
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(_HERE.parents[2]), str(_HERE.parent)])}
#: For a test that says something of every device; on the chip it takes a while.
DEVICES = ["cpu", pytest.param(CHIP, marks=pytest.mark.slow, id="chip")]


@contextmanager
def little_memory(name: str, times_used: float) -> Iterator[None]:
    """A context in which a device has so many times the memory that is in use now, if it is a chip."""
    device = get_device(name)
    if device.type == "chip":
        total, free = device.memory()
        device.set_memory_fraction(times_used * (total - free) / total)
    try:
        yield
    finally:
        if device.type == "chip":
            device.set_memory_fraction(1.0)
