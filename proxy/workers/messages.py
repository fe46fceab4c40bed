"""The messages of workers to each other through their parent."""

from __future__ import annotations

import msgspec


class Drained(msgspec.Struct, frozen=True, tag=True):
    """An operator has taken the instance at ``url`` out of service, or back."""

    name: str
    url: str
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
    as JSON, ``instances`` are those of it: URLs by name."""

    config: str
    instances: dict[str, str]


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """The other workers' answers, as MessagePack, and which of those that serve have not answered."""

    answers: list[bytes]
    silent: list[int]


Change = Drained | Joined | Left | TakenOver


class Shared(msgspec.Struct, kw_only=True):
    """The knowledge that every worker needs; the parent keeps it for those that are started again.

    ``config``: of the last :class:`TakenOver`, "" before the first. ``again``: the worker has had a life before.
    """

    drained: dict[str, Drained] = msgspec.field(default_factory=dict)
    joined: dict[str, Joined] = msgspec.field(default_factory=dict)
    config: str = ""
    again: bool = False

    def apply(self, change: Change, now_s: float) -> None:
        """From now on; leases that are over by ``now_s`` are forgotten."""
        match change:
            case Drained(name, on=True):
                self.drained[name] = change
            case Drained(name):
                self.drained.pop(name, None)
            case Joined(name):
                self.joined[name] = change
            case Left(name):
                self._forget(name)
            case TakenOver(config, instances):
                self.config = config
                here = instances | {name: joined.url for name, joined in self.joined.items()}
                for name in [name for name, drained in self.drained.items() if here.get(name) != drained.url]:
                    del self.drained[name]
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget whose lease is over by now."""
        for name in [name for name, joined in self.joined.items() if joined.deadline_s <= now_s]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """One that joins under this name later is another instance: no worker has it drained."""
        self.joined.pop(name, None)
        self.drained.pop(name, None)

    def changes(self) -> list[Change]:
        """The changes that lead here from a fresh start, but for the deployment file."""
        return [*self.joined.values(), *self.drained.values()]
