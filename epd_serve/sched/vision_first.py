"""Vision-first priority on an instance that steals: the tower computes first (HeteroServe, section 5.3.1)."""

from __future__ import annotations


class VisionFirst:
    """Holds steps of the language model back while anything waits for the tower or is in it.

    Stolen sequences would never end where images never stop coming. So one step is let through after each
    ``patience_s`` of waiting; an encode waits for stealing that one step at most. ``now`` is in seconds.
    """

    def __init__(self, *, patience_s: float = 1.0) -> None:
        self._patience_s = patience_s
        self._held_since: float | None = None

    def may_step(self, now: float, num_items: int) -> bool:
        """Whether the language model may take a step now; the caller asks again until it may."""
        if not num_items:
            self._held_since = None
            return True
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < self._patience_s:
            return False
        self._held_since = now
        return True
