"""The gateway's knowledge of its instances. No I/O and no clock: reports feed it, policies read it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from epd_serve.cost.stages import (
    MAX_BATCH_PIXELS,
    MAX_BATCH_TOKENS,
    NONE,
    PRIOR_DECODE,
    PRIOR_ENCODE,
    PRIOR_OUTPUT_TOKENS,
    PRIOR_PREFILL,
    UNKNOWN,
    Place,
    StageCosts,
    Work,
)
from epd_serve.protocol.instance_state import InstanceInfo, Load, Report
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import Role, Stage, StageRate

#: Weight of an encode in ``recent_pixels`` after the next one: about the last 200 count.
_RECENT_MEMORY = 0.995
#: Weight of a report in the mean length of answers.
_GAIN = 0.1


class InstanceTable:
    """The instances of one deployment, by name.

    Attributes:
        num_calls: number of calls that this gateway has opened so far.
        first_start_s: the longest time until an instance was ready for the first time.
    """

    def __init__(self, instances: list[tuple[str, str]]) -> None:
        """``instances`` are (name, control URL). Raises ValueError for a name that occurs twice."""
        self._records = {name: InstanceRecord(name=name, url=url) for name, url in instances}
        if len(self._records) != len(instances):
            raise ValueError(f"instance names must be unique, got {[name for name, _ in instances]}")
        self.num_calls = 0
        self.first_start_s = 0.0
        self._models: dict[str, InstanceInfo] | None = None  # None: to be looked up
        self._last_models: dict[str, InstanceInfo] = {}
        self._covering: dict[tuple[Stage, str | None], list[InstanceRecord]] = {}  # by stage and model
        #: The last rates that were measured anywhere, and by which instance.
        self._rates = {"E": ("", PRIOR_ENCODE), "P": ("", PRIOR_PREFILL), "D": ("", PRIOR_DECODE)}
        self._mean_output_tokens = 0.0

    def __iter__(self) -> Iterator[InstanceRecord]:
        return iter(self._records.values())

    def __getitem__(self, name: str) -> InstanceRecord:
        return self._records[name]

    def get(self, name: str) -> InstanceRecord | None:
        return self._records.get(name)

    def add(self, name: str, url: str) -> None:
        assert name not in self._records
        self._drop_caches()
        self._records[name] = InstanceRecord(name=name, url=url)

    def remove(self, name: str) -> None:
        """Remove an instance: it gets no new request; a caller that holds its record may still use it."""
        self.models()  # are remembered beyond the last instance that has one
        self._drop_caches()
        del self._records[name]

    def _drop_caches(self) -> None:
        """Drop what was looked up over all instances: one has come, left or changed."""
        self._models = None
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
        record.stages = frozenset({Stage.ENCODE}) if info.assists else record.role.stages
        self._drop_caches()
        before = record.info or info
        record.before = record.info if info.pid == before.pid else None
        record.num_restarts += info.pid != before.pid
        if (info.pid, info.epoch) != (before.pid, before.epoch):
            record.num_lives += 1  # another process, or its caches were made anew
            record.features.clear()
            record.prefixes.clear()
        record.info = info
        record._pending = None
        record.place = Place(host_id=info.host_id, device=info.device)
        if contains is not None:
            received = [key for key, calls in record._unreported.items() for c in calls if c.number <= contains]
            self.report(name, Report(load=info.load, ready=info.ready, received=received, epoch=info.epoch))
        elif info.ready != record.ready:
            self._set_ready(record, info.ready)

    def report(self, name: str, report: Report) -> None:
        """Take over a report of an instance whose info is known."""
        record, load = self._records[name], report.load
        assert record.info is not None
        record.load = load
        record._reported = Work(  # KV that is held or reserved is not in free_blocks any more
            num_pixels=load.num_waiting_pixels,
            num_tokens=load.num_waiting_tokens,
            num_sequences=load.num_running + load.num_waiting + load.num_expected,
        )
        record._ended = NONE
        for key in report.received:
            if calls := record._unreported.get(key):
                call = calls.pop(0)
                call.is_reported = True
                record._own -= call.work
                if not calls:
                    del record._unreported[key]
        if not record._unreported:
            record._own = NONE  # floating point leaves crumbs
        for mm_hash in report.encoded:
            record.features.add(mm_hash)
        record.costs = self._resolve_costs(record)
        record._pending = None
        if report.ready != record.ready:
            self._set_ready(record, report.ready)

    def _set_ready(self, record: InstanceRecord, ready: bool) -> None:
        if ready:
            for stage in Stage:  # else it would get all work until it has caught up with its peers
                peers = [one.num_chosen[stage] for one in self if one.ready and stage in one.stages]
                record.num_chosen[stage] = max([record.num_chosen[stage], *peers])
            record.num_lives += record.is_down
            record.is_down = False
        record.ready = ready

    def _resolve_costs(self, record: InstanceRecord) -> StageCosts:
        """Return an instance's costs: as it measured them lately, else as any instance did, else as it once did.

        An instance whose rates are old gets those of another, so that it is tried again: one that was slow in an
        unlucky moment is not avoided for ever. The mean length of answers is taken over all instances: one that
        has seen few answers end would be avoided, or get all requests, for these alone.
        """
        assert record.info is not None
        load, budgets = record.load, record.info.budgets
        if load.mean_output_tokens:
            mean = self._mean_output_tokens or load.mean_output_tokens
            self._mean_output_tokens = mean + _GAIN * (load.mean_output_tokens - mean)
        rates: dict[str, StageRate] = {}
        for stage, (source, latest) in self._rates.items():
            own = load.rates.get(stage)
            if own is not None and (own.is_fresh or source == record.name):
                self._rates[stage] = record.name, own
            rates[stage] = own if own is not None and (own.is_fresh or not latest.is_fresh) else latest
        return StageCosts(
            encode=rates["E"],
            prefill=rates["P"],
            decode=rates["D"],
            max_batch_pixels=budgets.get("image_budget_pixels") or MAX_BATCH_PIXELS,
            max_batch_tokens=budgets.get("max_num_batched_tokens") or MAX_BATCH_TOKENS,
            mean_output_tokens=self._mean_output_tokens or PRIOR_OUTPUT_TOKENS,
        )

    def mark_lost(self, name: str) -> None:
        """Give an instance no work until it answers ``/info`` again."""
        if name in self._records:
            self._records[name].ready = False

    def mark_down(self, name: str) -> None:
        """Note that an instance does not answer; when it returns, earlier failures say nothing about it."""
        if name in self._records:
            self._records[name].ready = False
            self._records[name].is_down = True

    # ------------------------------------------------------------------ what policies and pages ask

    def ready(self, stage: Stage, model: str | None = None) -> list[InstanceRecord]:
        """Return the instances that are up and cover a stage (of one model, where given), in deployment order."""
        covering = self._covering.get((stage, model))
        if covering is None:
            covering = [
                one
                for one in self
                if stage in one.stages and (model is None or (one.info is not None and one.info.model == model))
            ]
            if covering:  # names of models that there are not could be any number
                self._covering[stage, model] = covering
        return [one for one in covering if one.ready and not one.drains]

    def models(self) -> dict[str, InstanceInfo]:
        """Return for each model the info of an instance that prefills it, in the order of the deployment.

        Up or not; where all such instances have left, the info of the last ones, which others may replace.
        """
        if self._models is None:
            found: dict[str, InstanceInfo] = {}
            for record in self:
                if record.info is not None and Stage.PREFILL in record.stages:
                    found.setdefault(record.info.model, record.info)
            self._models = self._last_models = found or self._last_models
        return self._models

    def missing_stages(self, stages: Iterable[Stage] = (Stage.PREFILL, Stage.DECODE)) -> list[Stage]:
        """Return the stages that no instance covers which is up. E is not needed: P can encode in its place."""
        return [stage for stage in stages if not self.ready(stage)]

    def lacks_roles(self) -> bool:
        """Whether no known instance covers P, or none covers D."""
        return any(not any(stage in one.stages for one in self) for stage in (Stage.PREFILL, Stage.DECODE))

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
        call = OpenCall(record, stage, stage + request_id, work, self.num_calls)
        record.in_flight[stage] += 1
        record.num_chosen[stage] += 1
        if work.num_pixels:
            record.sent_encode_s += record.costs.encode_s(work.num_pixels)
        if work is not NONE:
            record._own = work if record._own is NONE else record._own + work
        record._pending = None
        record._unreported.setdefault(call.key, []).append(call)
        return call

    @contextmanager
    def encoding(self, record: InstanceRecord, ref: MediaRef, request_id: str = "") -> Iterator[OpenCall]:
        """Count one open encode call; an item that is being encoded there, or has been, adds no work.

        A call that fails leaves no feature in the record.
        """
        mm_hash, work = ref.mm_hash, NONE
        if mm_hash not in record.features and mm_hash not in record.encoding:
            work = Work(num_pixels=ref.num_pixels)
            for one in self._records.values():
                one.recent_pixels *= _RECENT_MEMORY
            record.recent_pixels += work.num_pixels
        call = self.in_flight(record, Stage.ENCODE, request_id=request_id, work=work)
        record.encoding[mm_hash] += 1
        try:
            yield call
            record.features.add(mm_hash)
        except Exception:
            record.features.pop(mm_hash, None)
            raise
        finally:
            call.close()
            record.encoding[mm_hash] -= 1
            if not record.encoding[mm_hash]:
                del record.encoding[mm_hash]


@dataclass(slots=True, eq=False)
class InstanceRecord:
    """One instance as last seen: up (ready and not draining), draining or down.

    Attributes:
        name: its name in the deployment.
        url: its control URL.
        info: its last answer to ``/info``; None until the first.
        place: its host and device, from that answer.
        role: its role, from that answer; None until the first. stages: those of it, E alone where it assists; none
            until the first.
        ready: whether it answers and is ready to work.
        drains: who has ordered that it gets no new request: the operator, a role switch.
        is_down: whether it was found not to answer; False again once it is ready.
        num_lives: number of times that it became another process or role, or returned after it was down.
        before: its answer to ``/info`` before the last one, if the same process gave it.
        num_restarts: number of times that another process has taken its place.
        load: its last report's.
        costs: times of its stages, by its own measurements where there are any.
        in_flight: this gateway's open calls, by stage.
        encoding: number of open encode calls by the mm_hash that is encoded.
        recent_pixels: pixels that this gateway has sent there to be encoded, older ones counting less.
        features: mm_hashes of items that were encoded there lately, as far as is known.
        prefixes: beginnings of the prompts that went there.
        num_chosen: number of calls that this gateway has opened, by stage; equals take turns by it.
        sent_encode_s, sent_sequences: work that this gateway has sent there so far: seconds of encoding, and
            sequences to decode, each at its first try.
    """

    name: str
    url: str
    info: InstanceInfo | None = None
    place: Place = UNKNOWN
    role: Role | None = None
    stages: frozenset[Stage] = frozenset()
    ready: bool = False
    drains: set[str] = field(default_factory=set)
    is_down: bool = False
    num_lives: int = 0
    before: InstanceInfo | None = None
    num_restarts: int = 0
    load: Load = field(default_factory=Load)
    costs: StageCosts = field(default_factory=StageCosts)
    in_flight: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    encoding: Counter[str] = field(default_factory=Counter)
    recent_pixels: float = 0.0
    features: Recent[str] = field(default_factory=lambda: Recent(8192))
    prefixes: Recent[bytes] = field(default_factory=lambda: Recent(16384))
    num_chosen: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    sent_encode_s: float = 0.0
    sent_sequences: float = 0.0
    _pending: Work | None = NONE  # None: it, or the costs, have changed, and it is to be counted
    _reported: Work = NONE
    _own: Work = NONE  # of calls that the report does not contain
    _ended: Work = NONE  # of calls that it contains and that have ended since
    _unreported: dict[str, list[OpenCall]] = field(default_factory=dict)

    @property
    def draining(self) -> bool:
        return bool(self.drains)

    @property
    def state(self) -> Literal["up", "draining", "down"]:
        if not self.ready:
            return "down"
        return "draining" if self.draining else "up"

    @property
    def pending(self) -> Work:
        """The instance's work: its last report, and this gateway's calls that the report does not contain."""
        if self._pending is None:
            left = self._reported if self._ended is NONE else self._reported - self._ended
            self._pending = left if self._own is NONE else left + self._own
        return self._pending

    @property
    def num_queued(self) -> int:
        """Requests that wait for its language model, with this gateway's new ones."""
        new = sum(call.stage is Stage.PREFILL for calls in self._unreported.values() for call in calls)
        return self.load.num_waiting + self.load.num_refused + new

    @property
    def encode_s(self) -> float:
        """Seconds of encoding to do."""
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
        """Seconds until there is room for a prompt's KV; 0 where there is room, or its pool is unknown."""
        if self.info is None or not self.load.total_blocks:
            return 0.0
        missing = num_tokens - self.room_tokens
        if missing <= 0:
            return 0.0
        held_blocks = max(0, self.load.total_blocks - self.load.free_blocks)
        held = held_blocks * self.info.block_size + self.pending.num_kv_tokens
        return self.costs.room_s(missing, held, self.pending.num_sequences)


class OpenCall(msgspec.Struct, eq=False):
    """A call that counts as in flight, with its work, until it is closed.

    Attributes:
        key: stage and request id, as the instance reports it.
        is_reported: the instance has.
    """

    record: InstanceRecord
    stage: Stage
    key: str
    work: Work
    number: int
    is_reported: bool = False

    def close(self) -> None:
        """End the call; to be called once."""
        record, key = self.record, self.key
        record.in_flight[self.stage] -= 1
        record._pending = None
        if self.is_reported:
            record._ended += self.work
            return
        calls = record._unreported[key]
        calls.remove(self)
        if not calls:
            del record._unreported[key]
        if self.work is not NONE:
            record._own -= self.work


T = TypeVar("T", bound=Hashable)


class Recent(OrderedDict[T, None]):
    """The last ``capacity`` keys that were added."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def add(self, key: T) -> None:
        self[key] = None
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)


#: Tokens of a patch of 28 pixels square.
PRIOR_TOKENS_PER_PIXEL = 1 / 784
