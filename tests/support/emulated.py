"""Emulated accelerators for tests: what is read too early there is no number, and memory ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from device.registry import get_device

#: Its index is no other kind's in the tests of a process.
EMULATED = "emulated:h200:12"
#: For a test that says something of every device; on the emulated one it takes a while.
DEVICES = ["cpu", pytest.param(EMULATED, marks=pytest.mark.slow, id="emulated")]


@contextmanager
def little_memory(name: str, times_used: float) -> Iterator[None]:
    """A context in which a device has so many times the memory that is in use now, if it is emulated."""
    device = get_device(name)
    if device.type == "emulated":
        total, free = device.memory()
        device.set_memory_fraction(times_used * (total - free) / total)
    try:
        yield
    finally:
        if device.type == "emulated":
            device.set_memory_fraction(1.0)
