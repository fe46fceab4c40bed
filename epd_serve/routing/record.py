"""One instance as the gateway sees it, and the calls that count as its work. No I/O and no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

from epd_serve.cost.stages import NONE, UNKNOWN, Place, StageCosts, Work
from epd_serve.protocol.wire import InstanceInfo, Load
from epd_serve.routing.estimates import work_of
from epd_serve.types import Role, Stage


@dataclass(slots=True, eq=False)
class InstanceRecord:
    """One instance as last seen.

    Attributes:
        name: its name in the deployment.
        url: its control URL.
        info: its last answer to ``/info``; None until the first.
        place: its host and device, from that answer.
        role: its role, from that answer; None until the first.
        ready: whether it answers and is ready to work.
        accepting: whether this gateway gives it any.
        cut_off: names of instances that it cannot reach, as far as is known, though this gateway can.
        is_gone: it cannot be reached. num_returns: number of times that it was here again after that.
        before: its answer to ``/info`` before the last one, if the same process gave it.
        num_restarts: number of times that another process has taken its place.
        is_stale: it has been silent for longer than it should; it gets work only where no other can take it.
        load: its last report's.
        costs: times of its stages, by its own measurements where there are any.
        in_flight: this gateway's open calls, by stage.
        encoding: number of open encode calls by the mm_hash that is encoded.
        recent_pixels: pixels that this gateway has sent there to be encoded, older ones counting less.
        features: mm_hashes of items that were encoded there lately, as far as is known.
        kept: those of them that were complete when this gateway last asked; others may still be in the making.
        prefixes: beginnings of the prompts that went there.
        num_chosen: number of calls that this gateway has opened, by stage; breaks ties, so that equals take turns.
        sent_encode_s, sent_sequences: work that this gateway has sent there so far: seconds of encoding, and
            sequences to decode, each at its first try.
    """

    name: str
    url: str
    info: InstanceInfo | None = None
    place: Place = UNKNOWN
    role: Role | None = None
    ready: bool = False
    accepting: bool = True
    cut_off: set[str] = field(default_factory=set)
    is_gone: bool = False
    num_returns: int = 0
    before: InstanceInfo | None = None
    num_restarts: int = 0
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
    sent_encode_s: float = 0.0
    sent_sequences: float = 0.0
    _pending: Work | None = NONE  # None: to be counted
    _reported: Work = NONE
    _own: Work = NONE  # of calls that the report does not contain
    _ended: Work = NONE  # of calls that it contains and that have ended since
    _unreported: dict[str, list[OpenCall]] = field(default_factory=dict)
    _known: dict[tuple[float, float | None], tuple[float, float, float]] = field(default_factory=dict)

    @property
    def pending(self) -> Work:
        """The instance's work: its last report, and this gateway's calls that the report does not contain."""
        if self._pending is None:
            left = self._reported if self._ended is NONE else self._reported - self._ended
            self._pending = left if self._own is NONE else left + self._own
        return self._pending

    @property
    def steals(self) -> bool:
        """Whether language work comes to it by stealing alone (:mod:`epd_serve.routing.stealing`)."""
        return self.info is not None and self.info.steals

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
        """Seconds until there is room for a prompt's KV; 0 where there is room, or its pool is unknown."""
        if self.info is None or not self.load.total_blocks:
            return 0.0
        missing = num_tokens - self.room_tokens
        if missing <= 0:
            return 0.0
        held_blocks = max(0, self.load.total_blocks - self.load.free_blocks)
        held = held_blocks * self.info.block_size + self.pending.num_kv_tokens
        return self.costs.room_s(missing, held, self.pending.num_sequences)

    def decode_s(self, num_sequences: float, max_tokens: float | None) -> tuple[float, float, float]:
        """(seconds that ``num_sequences`` more cost, KV tokens that have room, seconds of encoding to do).

        The result is kept: a request is compared at all instances, and few of them have changed since the last
        request.
        """
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
        if work.num_pixels:
            record.sent_encode_s += record.costs.encode_s(work.num_pixels)
        if work is not NONE:
            record._own += work
        record._changed()
        calls = record._unreported.get(key)
        if calls is None:
            record._unreported[key] = [self]
        else:
            calls.append(self)

    def close(self) -> None:
        """End the call; to be called once."""
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
        if self.work is not NONE:
            record._own -= self.work

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Encoding:
    """An open encode call of ``mm_hash``, as a context; an encode that fails leaves no feature in the record.

    Attributes:
        was_known: whether this gateway thought that the instance had the feature.
        was_cached: whether the instance had it.
    """

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


T = TypeVar("T", bound=Hashable)


class Recent(Generic[T]):
    """The last ``capacity`` keys that were added."""

    __slots__ = ("_capacity", "_keys")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, key: T) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: T) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def discard(self, key: T) -> None:
        self._keys.pop(key, None)

    def forget_half(self) -> None:
        """Remove the half of the keys that was added first."""
        for _ in range(len(self._keys) // 2):
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
