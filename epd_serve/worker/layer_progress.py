"""A device's progress through its rank's commands, for threads that wait for the KV of some layers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from device.base import Event


class LayerProgress:
    """Commands are counted from 1, in the order in which they are executed; some are steps, layer by layer.

    Args:
        record_event: marks the device's work so far.
    """

    def __init__(self, record_event: Callable[[], Event]) -> None:
        self._record_event = record_event
        self._changed = threading.Condition()
        self._commands = 0
        self._layer = -1
        self._event: Event | None = None

    def passed(self, layer: int) -> None:
        """Note that the current step has given the device all work up to a layer's KV; the model's hook."""
        event = self._record_event()
        with self._changed:
            self._layer, self._event = layer, event
            self._changed.notify_all()

    def finished(self) -> None:
        """Note that the current command has given the device all of its work."""
        event = self._record_event()
        with self._changed:
            self._commands += 1
            self._layer, self._event = -1, event
            self._changed.notify_all()

    def wait(self, command: int, layer: int) -> None:
        """Block until the device has done ``command``, or, where that is a step, written the KV of ``layer``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._commands >= command or (self._commands == command - 1 and self._layer >= layer)
            )
            event = self._event
        if event is not None:
            event.synchronize()
