"""What the gateway knows of its instances. No I/O and no clock: a poller feeds it, policies read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from epd_serve.protocol.wire import InstanceInfo
from epd_serve.types import Role, Stage


@dataclass(slots=True, eq=False)
class InstanceRecord:
    """One instance as last seen.

    Attributes:
        name: what the deployment calls it.
        url: its control URL.
        info: its last answer to ``/info``; None until the first.
        role: from that answer; None until the first.
        ready: whether it may be given work.
        in_flight: this gateway's open calls, by stage.
        encoding: how many of them, by the mm_hash that is encoded.
        num_chosen: how often this gateway has opened a call; breaks ties, so that equal instances take turns.
    """

    name: str
    url: str
    info: InstanceInfo | None = None
    role: Role | None = None
    ready: bool = False
    in_flight: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    encoding: Counter[str] = field(default_factory=Counter)
    num_chosen: int = 0

    @property
    def load(self) -> int:
        """Requests and encodes at the instance: what it reported, plus this gateway's open calls."""
        own = sum(self.in_flight.values())
        if self.info is None:
            return own
        reported = self.info.load
        return own + reported.num_running + reported.num_waiting + reported.num_waiting_encodes

    def covers(self, stage: Stage) -> bool:
        return self.role is not None and stage in self.role.stages


class InstanceTable:
    """The instances of one deployment, by name; their number is fixed."""

    def __init__(self, instances: list[tuple[str, str]]) -> None:
        """``instances`` are (name, control URL). Raises ValueError for a name that occurs twice."""
        self._records = {name: InstanceRecord(name=name, url=url) for name, url in instances}
        if len(self._records) != len(instances):
            raise ValueError(f"instance names must be unique, got {[name for name, _ in instances]}")

    def __iter__(self) -> Iterator[InstanceRecord]:
        return iter(self._records.values())

    def __getitem__(self, name: str) -> InstanceRecord:
        return self._records[name]

    def get(self, name: str) -> InstanceRecord | None:
        return self._records.get(name)

    def update(self, name: str, info: InstanceInfo) -> None:
        """Take over what an instance says of itself. Raises ValueError for a role that is none."""
        record = self._records[name]
        record.role = Role.parse(info.role)
        record.info = info
        record.ready = info.ready

    def mark_lost(self, name: str) -> None:
        """No work for this instance until it answers ``/info`` again."""
        self._records[name].ready = False

    def ready(self, stage: Stage, model: str | None = None) -> list[InstanceRecord]:
        """Ready instances that cover a stage (of one model, where given), in the order of the deployment."""
        return [
            record
            for record in self
            if record.ready
            and record.covers(stage)
            and (model is None or (record.info is not None and record.info.model == model))
        ]

    def models(self) -> dict[str, InstanceInfo]:
        """Model name → info of an instance that prefills it, ready or not, in the order of the deployment."""
        found: dict[str, InstanceInfo] = {}
        for record in self:
            if record.info is not None and record.covers(Stage.PREFILL):
                found.setdefault(record.info.model, record.info)
        return found

    def missing_stages(self) -> list[Stage]:
        """Of P and D, the stages that no ready instance covers. E is no must: P can encode in its place."""
        return [stage for stage in (Stage.PREFILL, Stage.DECODE) if not self.ready(stage)]

    @contextmanager
    def in_flight(self, record: InstanceRecord, stage: Stage, mm_hash: str | None = None) -> Iterator[None]:
        """Count one open call at ``record`` for as long as the context lasts; an encode's with what it encodes."""
        record.in_flight[stage] += 1
        record.num_chosen += 1
        if mm_hash is not None:
            record.encoding[mm_hash] += 1
        try:
            yield
        finally:
            record.in_flight[stage] -= 1
            if mm_hash is not None:
                record.encoding[mm_hash] -= 1
                record.encoding = +record.encoding  # without those at zero
