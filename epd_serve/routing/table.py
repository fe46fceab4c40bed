"""The gateway's knowledge of its instances. No I/O and no clock: reports feed it, policies read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from epd_serve.cost.stages import NONE, Place, Work
from epd_serve.protocol.wire import InstanceInfo, MediaRef, Report
from epd_serve.routing.estimates import resolve_costs
from epd_serve.routing.record import Encoding
from epd_serve.routing.record import InstanceRecord as InstanceRecord
from epd_serve.routing.record import OpenCall as OpenCall
from epd_serve.types import Role, Stage

#: What an encode weighs in ``recent_pixels`` after the next one: about the last 200 count.
_RECENT_MEMORY = 0.995


class InstanceTable:
    """The instances of one deployment, by name."""

    def __init__(self, instances: list[tuple[str, str]]) -> None:
        """``instances`` are (name, control URL). Raises ValueError for a name that occurs twice."""
        self._records = {name: InstanceRecord(name=name, url=url) for name, url in instances}
        if len(self._records) != len(instances):
            raise ValueError(f"instance names must be unique, got {[name for name, _ in instances]}")
        self.num_calls = 0
        self.has_thieves = False
        self._models: dict[str, InstanceInfo] | None = None  # None: to be looked up
        self._last_models: dict[str, InstanceInfo] = {}
        self._peers: dict[frozenset[Stage], list[InstanceRecord]] = {}  # by their stages
        self._covering: dict[tuple[Stage, str | None], list[InstanceRecord]] = {}  # by stage and model

    def __iter__(self) -> Iterator[InstanceRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, name: str) -> InstanceRecord:
        return self._records[name]

    def get(self, name: str) -> InstanceRecord | None:
        return self._records.get(name)

    def add(self, name: str, url: str) -> None:
        assert name not in self._records
        self._forget()
        self._records[name] = InstanceRecord(name=name, url=url)

    def remove(self, name: str) -> None:
        """Forget the instance: it gets nothing new, but a caller that holds its record may go on to use it."""
        self.models()  # are remembered beyond the last instance that has one
        self._forget()
        del self._records[name]

    def _forget(self) -> None:
        """Drop the caches over all instances: an instance has come, left or changed."""
        self._models = None
        self._peers.clear()
        self._covering.clear()

    # ------------------------------------------------------------------ what instances say

    def update(self, name: str, info: InstanceInfo, *, contains: int | None = None) -> None:
        """Take over an instance's info. Raises ValueError for an invalid role.

        Args:
            contains: :attr:`num_calls` when it was asked: its load contains the calls up to that one. None: its
                load is not looked at, because it makes reports.
        """
        record = self._records[name]
        record.role = Role.parse(info.role)
        self._forget()
        before = record.info or info
        record.before = record.info if info.pid == before.pid else None
        record.num_restarts += info.pid != before.pid
        if (info.pid, info.epoch) != (before.pid, before.epoch):
            record.kept.clear()
            record.features.clear()  # another process, or its caches were made anew
            record.prefixes.clear()
        record.info = info
        record._changed()
        record.place = Place(host_id=info.host_id, device=info.device)
        self.has_thieves = any(one.steals for one in self)
        if contains is not None:
            received = [key for key, calls in record._unreported.items() for c in calls if c.number <= contains]
            self._report(record, Report(load=info.load, ready=info.ready, received=received, epoch=info.epoch))
        else:
            self._set_ready(record, info.ready)

    def epoch(self, name: str) -> int:
        """The epoch in the last info of an instance; see :class:`~epd_serve.protocol.wire.InstanceInfo`."""
        info = self._records[name].info
        return 0 if info is None else info.epoch

    def report(self, name: str, report: Report) -> None:
        """Take over a report of an instance whose info is known."""
        self._report(self._records[name], report)

    def _report(self, record: InstanceRecord, report: Report) -> None:
        record._take_over(report.load, report.received)
        for mm_hash in report.encoded:
            record.features.add(mm_hash)
        assert record.info is not None and record.role is not None
        others = [one.load for one in self._peers_of(record.role) if one is not record]
        record.costs = resolve_costs(report.load, record.info.budgets, others)
        record._changed()
        record.is_stale = False
        self._set_ready(record, report.ready)

    def _peers_of(self, role: Role) -> list[InstanceRecord]:
        """All instances with the stages of one role."""
        known = self._peers.get(role.stages)
        if known is None:
            known = [one for one in self if one.role is not None and one.role.stages == role.stages]
            self._peers[role.stages] = known
        return known

    def _set_ready(self, record: InstanceRecord, ready: bool) -> None:
        if ready and not record.ready:
            for stage in Stage:  # else it would get all work until it has caught up with its peers
                peers = [one.num_chosen[stage] for one in self if one.ready and one.covers(stage)]
                record.num_chosen[stage] = max([record.num_chosen[stage], *peers])
            record.num_returns += record.is_gone
            record.is_gone = False
        record.ready = ready

    def mark_lost(self, name: str) -> None:
        """Give an instance no work until it answers ``/info`` again."""
        if name in self._records:
            self._records[name].ready = False

    def mark_gone(self, name: str) -> None:
        """Note that an instance cannot be reached; after its return, earlier failures say nothing about it."""
        self.mark_lost(name)
        self._records[name].is_gone = True

    def mark_stale(self, name: str) -> None:
        """Give an instance no work, where another can take it, until its next report."""
        self._records[name].is_stale = True

    # ------------------------------------------------------------------ what policies and pages ask

    def ready(self, stage: Stage, model: str | None = None) -> list[InstanceRecord]:
        """Ready instances that cover a stage (of one model, where given), in the order of the deployment.

        Stale ones are among them only where there are no others, and for P and D thieves where there is nothing
        else at all.
        """
        covering = self._covering.get((stage, model))
        if covering is None:
            covering = [
                one
                for one in self
                if one.covers(stage) and (model is None or (one.info is not None and one.info.model == model))
            ]
            if covering:  # names of models that there are not could be any number
                self._covering[stage, model] = covering
        up = [one for one in covering if one.ready and one.accepting]
        if self.has_thieves and stage is not Stage.ENCODE:
            up = [one for one in up if not one.steals] or up
        return [one for one in up if not one.is_stale] or up

    def wait_s(self, model: str) -> float:
        """Estimate of what a small request of a model would wait now before it is computed; 0 where it cannot be
        known. Prompts wait for prefills before them, and for KV room where they are decoded."""
        prefills, decodes = self.ready(Stage.PREFILL, model), self.ready(Stage.DECODE, model)
        if not prefills or not decodes:
            return 0.0
        return max(min(one.prefill_s for one in prefills), min(one.room_s(1) for one in decodes))

    def models(self) -> dict[str, InstanceInfo]:
        """Model name → info of an instance that prefills it, ready or not, in the order of the deployment. Where
        all of these have left, that of the last ones, which others may replace."""
        if self._models is None:
            found: dict[str, InstanceInfo] = {}
            for record in self:
                if record.info is not None and record.covers(Stage.PREFILL):
                    found.setdefault(record.info.model, record.info)
            self._models = self._last_models = found or self._last_models
        return self._models

    def missing_stages(self, stages: Iterable[Stage] = (Stage.PREFILL, Stage.DECODE)) -> list[Stage]:
        """Return those of the stages that no ready instance covers. E is not needed: P can encode in its place."""
        return [stage for stage in stages if not self.ready(stage)]

    def lacks_roles(self) -> bool:
        """Whether no known instance covers P, or none covers D."""
        return any(not any(one.covers(stage) for one in self) for stage in (Stage.PREFILL, Stage.DECODE))

    # ------------------------------------------------------------------ what this gateway does

    def in_flight(
        self,
        record: InstanceRecord,
        stage: Stage,
        *,
        request_id: str = "",
        work: Work = NONE,
        prefix: Iterable[bytes] = (),
        again: bool = False,
    ) -> OpenCall:
        """Count one open call at ``record``, and its work, until it is closed.

        Args:
            request_id: id by which the instance reports the call as received.
            prefix: beginnings of the prompt that it will have in its cache.
            again: whether its sequences were sent before, if to others.
        """
        self.num_calls += 1
        for beginning in prefix:
            record.prefixes.add(beginning)
        if not again:
            record.sent_sequences += work.num_sequences
        return OpenCall(record, stage, request_id, work, self.num_calls)

    def encoding(self, record: InstanceRecord, ref: MediaRef, request_id: str = "") -> Encoding:
        """Count one open encode call; an item that is being encoded there, or has been, adds no work."""
        work = NONE
        if ref.mm_hash not in record.features and ref.mm_hash not in record.encoding:
            work = Work(num_pixels=ref.width * ref.height)
            for one in self:
                one.recent_pixels *= _RECENT_MEMORY
            record.recent_pixels += work.num_pixels
        call = self.in_flight(record, Stage.ENCODE, request_id=request_id, work=work)
        return Encoding(call, record, ref.mm_hash)
