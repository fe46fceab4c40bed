"""What workers tell each other through their parent."""

from __future__ import annotations

import msgspec


class Drained(msgspec.Struct, frozen=True, tag=True):
    """An operator has taken an instance out of service, or back."""

    name: str
    on: bool


class Joined(msgspec.Struct, frozen=True, tag=True):
    """An instance has joined, or renewed its lease: until ``deadline_s`` of the monotonic clock, which is one for
    all processes of a machine."""

    name: str
    url: str
    deadline_s: float


class Left(msgspec.Struct, frozen=True, tag=True):
    """An instance that had joined is gone."""

    name: str


class TakenOver(msgspec.Struct, frozen=True, tag=True):
    """The deployment file was read again and taken over, as each worker does by itself; ``config`` is what it has,
    as JSON."""

    config: str


Change = Drained | Joined | Left | TakenOver


class Shared(msgspec.Struct, kw_only=True):
    """What every worker must know, and the parent keeps for those that are started again.

    ``config``: of the last :class:`TakenOver`, "" before the first. ``again``: the worker has had a life before.
    """

    drained: set[str] = msgspec.field(default_factory=set)
    joined: dict[str, Joined] = msgspec.field(default_factory=dict)
    config: str = ""
    again: bool = False

    def apply(self, change: Change, now_s: float) -> None:
        """From now on; leases that are over by ``now_s`` are forgotten."""
        match change:
            case Drained(name, True):
                self.drained.add(name)
            case Drained(name, _):
                self.drained.discard(name)
            case Joined(name):
                self.joined[name] = change
            case Left(name):
                self.joined.pop(name, None)
            case TakenOver(config):
                self.config = config
        for name in [name for name, joined in self.joined.items() if joined.deadline_s <= now_s]:
            del self.joined[name]

    def changes(self) -> list[Change]:
        """Those that lead here from a fresh start, but for the deployment file."""
        return [*self.joined.values(), *(Drained(name, True) for name in sorted(self.drained))]
