"""Waiting for a layer of a step ends when the device is there, not before and not never."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from epd_serve.engine.follower import LayerProgress


@dataclass
class Event:
    synchronized: list[int] = field(default_factory=list)

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.synchronized.append(1)

    def elapsed_time(self, end_event: object) -> float:
        return 0.0


@pytest.mark.parametrize(("step", "layer", "after"), [(0, 3, 0), (1, 0, 1), (1, 3, 3), (2, 0, 4), (2, 3, 6)])
def test_a_waiter_goes_on_at_its_layer(step: int, layer: int, after: int) -> None:
    """Two steps of layers 1 and 3 (groups of two), each followed by its end."""
    event = Event()
    progress = LayerProgress(lambda: event)
    waited = threading.Event()

    def wait() -> None:
        progress.wait(step, layer)
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    happenings = [lambda: progress.passed(1), lambda: progress.passed(3), progress.finished] * 2
    for count, happening in enumerate(happenings):
        if count < {0: 0, 1: 1, 3: 2, 4: 4, 6: 5}[after]:
            assert not waited.wait(0.02), f"after {count} happenings"
        happening()
    assert waited.wait(60)
    assert bool(event.synchronized) == (step > 0)
