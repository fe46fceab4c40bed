"""Tries of a request: how many it may make, and which instances have failed it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from epd_serve.errors import ServeError
from epd_serve.routing.table import InstanceRecord, InstanceTable

#: A record, its process, its role and its returns until then.
_Life = tuple[InstanceRecord, int, int, int]


class Suspects:
    """Instances that failed a request: it avoids them, until they are other processes, have another role, or come
    back after an absence."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._lives: dict[str, _Life | None] = {}

    def add(self, names: Collection[str]) -> None:
        self._lives.update((name, self._life(name)) for name in names)

    def names(self) -> set[str]:
        return {name for name, life in self._lives.items() if self._life(name) == life}

    def _life(self, name: str) -> _Life | None:
        record = self._table.get(name)
        if record is None or record.info is None:
            return None
        return record, record.info.pid, record.info.epoch, record.num_returns


@dataclass(slots=True)
class Tried:
    """The tries of a request so far; each of its choices that goes on by itself goes on from there.

    Attributes:
        num_attempts: that count.
        suspects: instances that failed it.
        failure: of the last attempt, where other instances may do better.
    """

    suspects: Suspects
    num_attempts: int = 0
    failure: ServeError | None = None

    def split(self) -> Tried:
        """For one choice: attempts of its own from now on; what fails one choice all of them avoid."""
        return Tried(self.suspects, self.num_attempts, self.failure)
