"""What the gateway knows of its instances. No I/O and no clock: reports feed it, policies read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from epd_serve.cost.links import UNKNOWN, Place
from epd_serve.cost.stages import StageCosts
from epd_serve.cost.work import NONE, Work
from epd_serve.protocol.wire import InstanceInfo, Load, MediaRef, Report
from epd_serve.routing.estimates import resolve_costs, work_of
from epd_serve.routing.recent import Recent
from epd_serve.types import Role, Stage

#: What an encode weighs in ``recent_pixels`` after the next one: about the last 200 count.
_RECENT_MEMORY = 0.995


@dataclass(slots=True, eq=False)
class InstanceRecord:
    """One instance as last seen.

    Attributes:
        name: what the deployment calls it.
        url: its control URL.
        info: its last answer to ``/info``; None until the first.
        place: where it is, from that answer.
        role: from that answer; None until the first.
        ready: whether it answers and is ready to work.
        accepting: whether this gateway gives it any.
        is_stale: it has been silent for longer than it should; it gets work only where no other can take it.
        load: as last reported.
        costs: of its stages, by its own measurements where there are any.
        in_flight: this gateway's open calls, by stage.
        encoding: how many of them, by the mm_hash that is encoded.
        recent_pixels: that this gateway has sent there to be encoded, older ones counting less.
        features: mm_hashes of what was encoded there lately, as far as is known.
        kept: those of them that were complete when this gateway last asked; others may still be in the making.
        prefixes: beginnings of the prompts that went there.
        num_chosen: how often this gateway has opened a call, by stage; breaks ties, so that equals take turns.
    """

    name: str
    url: str
    info: InstanceInfo | None = None
    place: Place = UNKNOWN
    role: Role | None = None
    ready: bool = False
    accepting: bool = True
    is_stale: bool = False
    load: Load = field(default_factory=Load)
    costs: StageCosts = field(default_factory=StageCosts)
    in_flight: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    encoding: Counter[str] = field(default_factory=Counter)
    recent_pixels: float = 0.0
    features: Recent[str] = field(default_factory=lambda: Recent(8192))
    kept: Recent[str] = field(default_factory=lambda: Recent(8192))
    prefixes: Recent[bytes] = field(default_factory=lambda: Recent(16384))
    num_chosen: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    _pending: Work | None = NONE  # None: to be counted
    _reported: Work = NONE
    _own: Work = NONE  # of calls that the report does not contain
    _ended: Work = NONE  # of calls that it contains and that have ended since
    _unreported: dict[str, list[OpenCall]] = field(default_factory=dict)
    _known: dict[tuple[float, float | None], tuple[float, float, float]] = field(default_factory=dict)

    @property
    def pending(self) -> Work:
        """What it has to do: as reported, with the calls of this gateway that the report does not contain."""
        if self._pending is None:
            self._pending = self._reported - self._ended + self._own
        return self._pending

    @property
    def encode_s(self) -> float:
        """Seconds of encoding to do."""
        if not self.pending.num_pixels:
            return 0.0
        return self.costs.encode_s(self.pending.num_pixels)

    @property
    def prefill_s(self) -> float:
        """Seconds of prefilling to do."""
        return self.costs.prefill_s(self.pending.num_tokens)

    @property
    def room_tokens(self) -> float:
        """KV that is free and not spoken for."""
        block_size = 0 if self.info is None else self.info.block_size
        return self.load.free_blocks * block_size - self.pending.num_kv_tokens

    def room_s(self, num_tokens: float) -> float:
        """Until there is room for a prompt's KV; 0 where it is there, or nothing is known of it."""
        if self.info is None or not self.load.total_blocks:
            return 0.0
        missing = num_tokens - self.room_tokens
        if missing <= 0:
            return 0.0
        held = (self.load.total_blocks - self.load.free_blocks) * self.info.block_size + self.pending.num_kv_tokens
        return self.costs.room_s(missing, held, self.pending.num_sequences)

    def decode_s(self, num_sequences: float, max_tokens: float | None) -> tuple[float, float, float]:
        """Seconds that so many more sequences cost, KV tokens for which there is room, seconds of encoding to do.
        A request is compared at all instances, and few of them have changed since the one before it."""
        key = num_sequences, max_tokens
        known = self._known.get(key)
        if known is None:
            seconds = self.costs.decode_s(num_sequences, self.pending.num_sequences, max_tokens)
            has_room = not self.load.total_blocks or self.info is None
            known = self._known[key] = seconds, float("inf") if has_room else self.room_tokens, self.encode_s
        return known

    def covers(self, stage: Stage) -> bool:
        return self.role is not None and stage in self.role.stages

    def _take_over(self, load: Load, received: Iterable[str]) -> None:
        self.load = load
        self._reported, self._ended = work_of(load), NONE
        for key in received:
            if calls := self._unreported.get(key):
                call = calls.pop(0)
                call.is_reported = True
                self._own -= call.work
                if not calls:
                    del self._unreported[key]
        if not self._unreported:
            self._own = NONE  # floating point leaves crumbs
        self._changed()

    def _changed(self) -> None:
        self._pending = None
        self._known.clear()


class OpenCall:
    """A call that counts as in flight, with its work, until it is closed; also as a context."""

    __slots__ = ("_key", "_record", "_stage", "is_reported", "number", "work")

    def __init__(self, record: InstanceRecord, stage: Stage, request_id: str, work: Work, number: int) -> None:
        self.work = work
        self.number = number
        self.is_reported = False
        self._record = record
        self._stage = stage
        self._key = key = stage + request_id
        record.in_flight[stage] += 1
        record.num_chosen[stage] += 1
        record._own += work
        record._changed()
        calls = record._unreported.get(key)
        if calls is None:
            record._unreported[key] = [self]
        else:
            calls.append(self)

    def close(self) -> None:
        """Once."""
        record, key = self._record, self._key
        record.in_flight[self._stage] -= 1
        record._changed()
        if self.is_reported:
            record._ended += self.work
            return
        calls = record._unreported[key]
        calls.remove(self)
        if not calls:
            del record._unreported[key]
        record._own -= self.work

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Encoding:
    """The same for an encode of ``mm_hash``: whether this gateway thought that the instance had the feature, and
    whether it had. A context: an encode that fails leaves none."""

    __slots__ = ("_call", "_mm_hash", "_record", "was_cached", "was_known")

    def __init__(self, call: OpenCall, record: InstanceRecord, mm_hash: str) -> None:
        self._call = call
        self._record = record
        self._mm_hash = mm_hash
        self.was_known = mm_hash in record.kept
        self.was_cached = True
        record.encoding[mm_hash] += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record, mm_hash = self._record, self._mm_hash
        self._call.close()
        if error is None:
            if self.was_known and not self.was_cached:
                record.features.forget_half()  # it keeps fewer than we thought
                record.kept.forget_half()
            record.features.add(mm_hash)
            record.kept.add(mm_hash)
        elif isinstance(error, Exception):
            record.features.discard(mm_hash)
            record.kept.discard(mm_hash)
        record.encoding[mm_hash] -= 1
        if not record.encoding[mm_hash]:
            del record.encoding[mm_hash]


class InstanceTable:
    """The instances of one deployment, by name."""

    def __init__(self, instances: list[tuple[str, str]]) -> None:
        """``instances`` are (name, control URL). Raises ValueError for a name that occurs twice."""
        self._records = {name: InstanceRecord(name=name, url=url) for name, url in instances}
        if len(self._records) != len(instances):
            raise ValueError(f"instance names must be unique, got {[name for name, _ in instances]}")
        self.num_calls = 0
        self._models: dict[str, InstanceInfo] | None = None  # None: to be looked up
        self._peers: dict[frozenset[Stage], list[InstanceRecord]] = {}  # by their stages

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
        self._models = None
        self._peers.clear()
        self._records[name] = InstanceRecord(name=name, url=url)

    def remove(self, name: str) -> None:
        """Nothing new for this instance; whoever holds its record may go on to use it."""
        self._models = None
        self._peers.clear()
        del self._records[name]

    # ------------------------------------------------------------------ what instances say

    def update(self, name: str, info: InstanceInfo, *, contains: int | None = None) -> None:
        """Take over what an instance says of itself. Raises ValueError for a role that is none.

        Args:
            contains: :attr:`num_calls` when it was asked: its load contains the calls up to that one. None: its
                load is not looked at, because it makes reports.
        """
        record = self._records[name]
        record.role = Role.parse(info.role)
        self._models = None
        self._peers.clear()
        before = record.info or info
        if (info.pid, info.epoch) != (before.pid, before.epoch):
            record.kept.clear()
            record.features.clear()  # another process, or its caches were made anew
            record.prefixes.clear()
        record.info = info
        record._changed()
        record.place = Place(host_id=info.host_id, device=info.device)
        if contains is not None:
            received = [key for key, calls in record._unreported.items() for c in calls if c.number <= contains]
            self._report(record, Report(load=info.load, ready=info.ready, received=received, epoch=info.epoch))
        else:
            self._set_ready(record, info.ready)

    def epoch(self, name: str) -> int:
        """Of the last info of an instance; see :class:`~epd_serve.protocol.wire.InstanceInfo`."""
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
        """All of one role."""
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
        record.ready = ready

    def mark_lost(self, name: str) -> None:
        """No work for this instance until it answers ``/info`` again."""
        if name in self._records:
            self._records[name].ready = False

    def mark_stale(self, name: str) -> None:
        """No work for this instance, where another can take it, until its next report."""
        self._records[name].is_stale = True

    # ------------------------------------------------------------------ what policies and pages ask

    def ready(self, stage: Stage, model: str | None = None) -> list[InstanceRecord]:
        """Ready instances that cover a stage (of one model, where given), in the order of the deployment.

        Stale ones are among them only where there are no others.
        """
        found: list[InstanceRecord] = []
        stale: list[InstanceRecord] = []
        for record in self._records.values():
            if (
                record.ready
                and record.accepting
                and record.role is not None
                and stage in record.role.stages
                and (model is None or (record.info is not None and record.info.model == model))
            ):
                (stale if record.is_stale else found).append(record)
        return found or stale

    def wait_s(self, model: str) -> float:
        """Estimate of what a small request of a model would wait now before it is computed; 0 where it cannot be
        known. Prompts wait for prefills before them, and for KV room where they are decoded."""
        prefills, decodes = self.ready(Stage.PREFILL, model), self.ready(Stage.DECODE, model)
        if not prefills or not decodes:
            return 0.0
        return max(min(one.prefill_s for one in prefills), min(one.room_s(1) for one in decodes))

    def models(self) -> dict[str, InstanceInfo]:
        """Model name → info of an instance that prefills it, ready or not, in the order of the deployment."""
        if self._models is None:
            self._models = {}
            for record in self:
                if record.info is not None and record.covers(Stage.PREFILL):
                    self._models.setdefault(record.info.model, record.info)
        return self._models

    def missing_stages(self) -> list[Stage]:
        """Of P and D, the stages that no ready instance covers. E is no must: P can encode in its place."""
        return [stage for stage in (Stage.PREFILL, Stage.DECODE) if not self.ready(stage)]

    # ------------------------------------------------------------------ what this gateway does

    def in_flight(
        self,
        record: InstanceRecord,
        stage: Stage,
        *,
        request_id: str = "",
        work: Work = NONE,
        prefix: Iterable[bytes] = (),
    ) -> OpenCall:
        """Count one open call at ``record``, and its work, until it is closed.

        Args:
            request_id: by which the instance reports the call as received.
            prefix: beginnings of the prompt that it will have in its cache.
        """
        self.num_calls += 1
        for beginning in prefix:
            record.prefixes.add(beginning)
        return OpenCall(record, stage, request_id, work, self.num_calls)

    def encoding(self, record: InstanceRecord, ref: MediaRef, request_id: str = "") -> Encoding:
        """The same for an encode: an item that is encoded there already, or was, is no work."""
        work = NONE
        if ref.mm_hash not in record.features and ref.mm_hash not in record.encoding:
            work = Work(num_pixels=ref.width * ref.height)
            for one in self:
                one.recent_pixels *= _RECENT_MEMORY
            record.recent_pixels += work.num_pixels
        call = self.in_flight(record, Stage.ENCODE, request_id=request_id, work=work)
        return Encoding(call, record, ref.mm_hash)
