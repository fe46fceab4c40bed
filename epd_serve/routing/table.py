"""The gateway's table of its instances. No I/O and no clock: reports update it, policies read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

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
from epd_serve.recent import Recent
from epd_serve.types import Role, Stage, StageRate

#: Decay of ``recent_pixels`` with each encode, so that about the last 200 count.
_RECENT_MEMORY = 0.995
#: Weight of a report in the mean length of answers.
_GAIN = 0.1


class InstanceTable:
    """The instances of one deployment, by name.

    Args:
        instances: (name, control URL) pairs; ValueError if a name occurs twice.

    Attributes:
        num_calls: calls that this gateway has opened so far.
        first_start_s: the longest time that an instance took to start.
    """

    def __init__(self, instances: list[tuple[str, str]]) -> None:
        self._records = {name: InstanceRecord(name=name, url=url) for name, url in instances}
        if len(self._records) != len(instances):
            raise ValueError(f"instance names must be unique, got {[name for name, _ in instances]}")
        self.num_calls = 0
        self.first_start_s = 0.0
        self._models: dict[str, InstanceInfo] | None = None  # a cache
        self._last_models: dict[str, InstanceInfo] = {}
        self._covering: dict[tuple[Stage, str | None], list[InstanceRecord]] = {}  # a cache by stage and model
        #: The latest measured rates by stage, each with the instance that measured it.
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
        """Remove an instance; callers that hold its record may still use it."""
        self.models()  # remembers the models of the last instance
        self._drop_caches()
        del self._records[name]

    def _drop_caches(self) -> None:
        self._models = None
        self._covering.clear()

    # ------------------------------------------------------------------ updates from instances

    def update(self, name: str, info: InstanceInfo, *, contains: int | None = None) -> None:
        """Store an instance's info. Raises ValueError for an invalid role.

        Args:
            contains: :attr:`num_calls` when the info was requested, as its load contains these calls; None for
                an instance that sends reports.
        """
        record = self._records[name]
        record.role = Role.parse(info.role)
        record.stages = frozenset({Stage.ENCODE}) if info.assists else record.role.stages
        self._drop_caches()
        before = record.info or info
        record.before = record.info if info.pid == before.pid else None
        # this gateway may have started after some of them
        record.num_restarts = max(record.num_restarts + (info.pid != before.pid), info.num_restarts)
        if (info.pid, info.epoch) != (before.pid, before.epoch):
            record.num_lives += 1  # another process, or one with empty caches
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
        """Store a report of an instance whose info is known."""
        record, load = self._records[name], report.load
        assert record.info is not None
        record.load = load
        record._reported = Work(  # free_blocks excludes its KV, once reserved
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
            record._own = NONE  # clears rounding errors
        for mm_hash in report.encoded:
            record.features.add(mm_hash)
        record.costs = self._resolve_costs(record)
        record._pending = None
        if report.ready != record.ready:
            self._set_ready(record, report.ready)

    def _set_ready(self, record: InstanceRecord, ready: bool) -> None:
        if ready:
            for stage in Stage:  # or it would get all requests until it had caught up with its peers
                peers = [one.num_chosen[stage] for one in self if one.ready and stage in one.stages]
                record.num_chosen[stage] = max([record.num_chosen[stage], *peers])
            record.num_lives += record.is_down
            record.is_down = False
        record.ready = ready

    def _resolve_costs(self, record: InstanceRecord) -> StageCosts:
        """Return an instance's costs: its own recent rates, else another's recent rates, else its old ones.

        With another's rates, a once slow instance is tried again. The mean answer length covers all
        instances, as a few answers would distort the mean of one.
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
        """Route no requests to an instance until it answers ``/info`` again."""
        if name in self._records:
            self._records[name].ready = False

    def mark_down(self, name: str) -> None:
        """Record that an instance does not answer; when it returns, it is not avoided any more."""
        if name in self._records:
            self._records[name].ready = False
            self._records[name].is_down = True

    # ------------------------------------------------------------------ queries of policies and pages

    def ready(self, stage: Stage, model: str | None = None) -> list[InstanceRecord]:
        """Return the instances up for a stage, of ``model`` if given, in deployment order."""
        covering = self._covering.get((stage, model))
        if covering is None:
            covering = [
                one
                for one in self
                if stage in one.stages and (model is None or (one.info is not None and one.info.model == model))
            ]
            if covering:  # unknown names of models would grow the cache without limit
                self._covering[stage, model] = covering
        return [one for one in covering if one.ready and not one.drains]

    def models(self) -> dict[str, InstanceInfo]:
        """Return the info of one prefill instance, up or not, for each model, in deployment order.

        After the last of them has left, its info remains.
        """
        if self._models is None:
            found: dict[str, InstanceInfo] = {}
            for record in self:
                if record.info is not None and Stage.PREFILL in record.stages:
                    found.setdefault(record.info.model, record.info)
            self._models = self._last_models = found or self._last_models
        return self._models

    def missing_stages(self, stages: Iterable[Stage] = (Stage.PREFILL, Stage.DECODE)) -> list[Stage]:
        """Return the stages without an instance up; E is optional, as P can encode."""
        return [stage for stage in stages if not self.ready(stage)]

    def lacks_roles(self) -> bool:
        """Return whether P or D lacks an instance, up or not."""
        return any(not any(stage in one.stages for one in self) for stage in (Stage.PREFILL, Stage.DECODE))

    # ------------------------------------------------------------------ this gateway's own calls

    def open_call(
        self,
        record: InstanceRecord,
        stage: Stage,
        *,
        request_id: str = "",
        work: Work = NONE,
        prefix: Iterable[bytes] = (),
        again: bool = False,
    ) -> OpenCall:
        """Count an open call at ``record`` and its work until the call is closed.

        Args:
            request_id: id under which the instance reports the call as received.
            prefix: hashes of the prompt's prefixes, which the instance will have cached.
            again: whether the sequences were sent before, perhaps to another instance.
        """
        self.num_calls += 1
        for digest in prefix:
            record.prefixes.add(digest)
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
    def open_encode(self, record: InstanceRecord, ref: MediaRef, request_id: str = "") -> Iterator[OpenCall]:
        """Count an open encode call, without work if the item is or was encoded there.

        A failed call removes the feature from the record.
        """
        mm_hash, work = ref.mm_hash, NONE
        if mm_hash not in record.features and mm_hash not in record.encoding:
            work = Work(num_pixels=ref.num_pixels)
            for one in self._records.values():
                one.recent_pixels *= _RECENT_MEMORY
            record.recent_pixels += work.num_pixels
        call = self.open_call(record, Stage.ENCODE, request_id=request_id, work=work)
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
        url: control URL.
        info: its last answer to ``/info``, from which ``place``, ``role`` and ``stages`` are set.
        stages: stages of its role; only E if it assists.
        ready: whether it answers and accepts requests.
        drains: causes that keep new requests away: the operator, a role switch.
        is_down: whether it did not answer; False once it is ready again.
        num_lives: counts changes of its process or caches, and returns after it was down.
        before: its ``/info`` before the last one, if of the same process.
        num_restarts: restarts of its process, also those before this gateway's start.
        load: load in its last report.
        costs: times of its stages.
        in_flight: this gateway's open calls, by stage.
        encoding: open encode calls by mm_hash.
        recent_pixels: pixels sent to be encoded, with exponential decay.
        features: mm_hashes recently encoded there.
        prefixes: hashes of the prompts' prefixes sent there.
        num_chosen: calls opened, by stage.
        sent_encode_s, sent_sequences: work sent so far: seconds of encoding, sequences to decode (first attempts).
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
    _pending: Work | None = NONE  # a cache
    _reported: Work = NONE
    _own: Work = NONE  # of calls not yet in the report
    _ended: Work = NONE  # of calls in the report that have ended since
    _unreported: dict[str, list[OpenCall]] = field(default_factory=dict)

    @property
    def state(self) -> Literal["up", "draining", "down"]:
        if not self.ready:
            return "down"
        return "draining" if self.drains else "up"

    @property
    def pending(self) -> Work:
        """The instance's work: its last report, and this gateway's calls since."""
        if self._pending is None:
            left = self._reported if self._ended is NONE else self._reported - self._ended
            self._pending = left if self._own is NONE else left + self._own
        return self._pending

    @property
    def num_queued(self) -> int:
        """Requests waiting for its language model, including this gateway's new ones."""
        new = sum(call.stage is Stage.PREFILL for calls in self._unreported.values() for call in calls)
        return self.load.num_waiting + self.load.num_refused + new

    @property
    def encode_s(self) -> float:
        """Seconds of pending encodes."""
        return self.costs.encode_s(self.pending.num_pixels)

    @property
    def prefill_s(self) -> float:
        """Seconds of pending prefills."""
        return self.costs.prefill_s(self.pending.num_tokens)

    @property
    def room_tokens(self) -> float:
        """KV tokens neither used nor needed by pending requests."""
        block_size = 0 if self.info is None else self.info.block_size
        return self.load.free_blocks * block_size - self.pending.num_kv_tokens

    def room_s(self, num_tokens: float) -> float:
        """Return the seconds until a prompt's KV fits; 0 if it does or the pool is unknown."""
        if self.info is None or not self.load.total_blocks:
            return 0.0
        missing = num_tokens - self.room_tokens
        if missing <= 0:
            return 0.0
        held_blocks = max(0, self.load.total_blocks - self.load.free_blocks)
        held = held_blocks * self.info.block_size + self.pending.num_kv_tokens
        return self.costs.room_s(missing, held, self.pending.num_sequences)


class OpenCall(msgspec.Struct, eq=False):
    """A call counted as in flight until it is closed.

    Attributes:
        key: stage and request id, as in reports.
        is_reported: whether a report contains it.
    """

    record: InstanceRecord
    stage: Stage
    key: str
    work: Work
    number: int
    is_reported: bool = False

    def close(self) -> None:
        """End the call. Call once."""
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


#: One token for 28 × 28 pixels.
PRIOR_TOKENS_PER_PIXEL = 1 / 784
