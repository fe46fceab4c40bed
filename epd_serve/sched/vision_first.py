"""Which side of an instance that steals computes next (HeteroServe, section 5.3.1: vision-first priority)."""

from __future__ import annotations


class VisionFirst:
    """Holds steps of the language model back while anything waits for the tower or is in it.

    What was stolen would never end where images never do: of a side that is held back for longer than
    ``patience_s``, one step is let through each time, which is what such encodes wait for stealing at most.
    ``now`` is in seconds.
    """

    def __init__(self, *, patience_s: float = 1.0) -> None:
        self._patience_s = patience_s
        self._held_since: float | None = None

    def may_step(self, now: float, num_items: int) -> bool:
        """Asked before each step, and where it says no, again until it does not."""
        if not num_items:
            self._held_since = None
            return True
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < self._patience_s:
            return False
        self._held_since = now
        return True
