"""Grouped KV transfer: a thread pushes each group of layers while the next ones are computed (EPD-Serve 3.3)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol, cast

from device.base import Event
from epd_serve.protocol.wire import KVOffer, KVTaken, OfferedKV, Region, ReserveReply
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.shared_memory import MAPPED_SLOT, UNMAP_S, WriteLocks, is_there
from epd_serve.transfer.staging import rounds
from epd_serve.transfer.transport import DeviceBytes, Piece, Span, TransferError, Transport

logger = logging.getLogger(__name__)

_IDLE_LANE_S = 60.0


class StagedKV(Protocol):
    """Blocks of some layers in memory that a transport can read."""

    def pieces(self, first: int, remote: Sequence[int], remote_num_blocks: int) -> list[Piece]:
        """Bytes of the blocks from ``first`` on, and where they belong in a slab of ``remote_num_blocks``."""
        ...


class RemoteWrite(Protocol):
    """Writes to the KV of another instance, on a device that this one reaches."""

    def __call__(self, layers: range, blocks: Sequence[int], remote: Sequence[int]) -> None:
        """Copy blocks that are computed to blocks there; they are there when this returns."""
        ...


class ReadableKV(StagedKV, Protocol):
    """The same in memory that peers can read."""

    def spans(self, first: int, count: int) -> list[Span]:
        """The places of ``count`` of the blocks, from number ``first`` on."""
        ...


class KVSource(Protocol):
    """The memory from which outgoing KV is sent."""

    @property
    def staged_cells(self) -> int | None:
        """The most layers × blocks that :meth:`stage` takes; None where there is no limit."""
        ...

    def stage(self, layers: range, blocks: Sequence[int]) -> AbstractContextManager[StagedKV]:
        """A context in which blocks that are computed can be read. It may wait for others' to end."""
        ...

    def mapped(self, region: Region) -> AbstractContextManager[RemoteWrite | None]:
        """A context in which the KV on the device behind ``region`` can be written to; None where it cannot."""
        ...

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of so many blocks in so many layers on the device: an emulated one's pieces have fewer."""
        ...


class ReadableSource(KVSource, Protocol):
    """The same where peers can read what is staged, as transfers with an ``offer`` need it."""

    @property
    def region(self) -> Region: ...

    @property
    def buffer(self) -> memoryview | DeviceBytes: ...

    def stage(self, layers: range, blocks: Sequence[int]) -> AbstractContextManager[ReadableKV]: ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One request's KV on its way to the decode instance.

    Attributes:
        target: blocks reserved for it; None until there are some.
        deadline: end of the lease; nothing is written or offered after it.
        offer: has the decode instance read what is staged, and returns when it has; None: it is written to. Where
            the KV of its device is mapped here, that is written to in any case.
        next_block: index of the first prompt block that is not yet pushed in full.
        computed_at: time at which the prompt's compute had ended.
        transfer_s: time spent copying; of a write that carried several transfers, the share of this one's bytes.
        exposed_s: the part of it after ``computed_at``.
        wait_s: seconds from ``computed_at`` to the end of its last write.
        num_queued: parts of it that the sender has not done with.
        on_passed: to be called when there are none.
    """

    transfer_id: str
    target: ReserveReply | None
    deadline: float
    next_block: int = 0
    offer: Callable[[KVOffer], KVTaken] | None = None
    cancelled: bool = False
    error: TransferError | None = None
    computed_at: float | None = None
    num_bytes: int = 0
    num_writes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    wait_s: float = 0.0
    num_queued: int = 0
    on_passed: list[Callable[[], object]] = field(default_factory=list)

    @property
    def overlap_ratio(self) -> float:
        """1 − exposed / transfer time: 1 means entirely hidden."""
        return 1.0 - self.exposed_s / self.transfer_s if self.transfer_s else 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one transfer: where they lie here and where they belong there."""

    transfer: OutgoingTransfer
    local: Sequence[int]
    remote: Sequence[int]

    @property
    def slot(self) -> int:
        """The number of the first block there that is this transfer's alone."""
        target = self.transfer.target
        assert target is not None
        return target.block_ids[target.num_cached_blocks]

    def within(self, numbers: range, start: int) -> Part | None:
        """Those of the blocks whose numbers are among ``numbers``, where its first one has number ``start``."""
        own = slice(max(numbers.start - start, 0), max(numbers.stop - start, 0))
        local = self.local[own]
        return Part(self.transfer, local, self.remote[own]) if local else None


@dataclass(frozen=True, slots=True)
class _Push:
    layers: range
    parts: Sequence[Part]
    computed: Event | None = None

    def rounds(self, most_cells: int) -> Iterator[tuple[range, list[Part]]]:
        """The push in parts that fit into so many cells."""
        starts = list(accumulate((len(part.local) for part in self.parts), initial=0))
        for layers, numbers in rounds(self.layers, starts[-1], most_cells):
            inside = (part.within(numbers, start) for part, start in zip(self.parts, starts, strict=False))
            yield layers, [part for part in inside if part is not None]


@dataclass(frozen=True, slots=True)
class _Connect:
    """Make the first contact."""


_Job = _Push | _Connect


class KVSender:
    """Pushes to each decode instance in the order given, to several of them at once.

    What is late goes together: layers of one step that are computed when their turn comes are one write, and so
    are steps of the same layers whose bytes take the link no longer than a handshake does. A transfer waits for
    another's bytes for that long at most. Where the size of groups is fixed, so are the writes.

    A transfer that failed or was cancelled writes nothing more.

    Args:
        clock: monotonic seconds; the same clock that deadlines and ``computed_at`` are set by.
        on_write: called with the bytes and seconds of each write, for metrics; a first contact has no bytes.
    """

    def __init__(
        self,
        transport: Transport,
        source: KVSource,
        sizer: GroupSizer,
        clock: Callable[[], float],
        on_write: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        self._transport = transport
        self._source = source
        self.sizer = sizer
        self._clock = clock
        self._on_write = on_write
        self._write_locks = WriteLocks()
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def connect(self, region: Region) -> None:
        """Make the first contact (mapping, connection) and measure the next one; nothing where that was done."""
        with self._lock:
            if region.name not in self._lanes:
                lane = self._lanes[region.name] = _Lane(region, self._run)
                lane.jobs.put(_Connect())

    def push(self, layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
        """Queue blocks of ``layers`` as one write; all parts go to one region.

        ``computed`` comes when the device has written them; None: it has.
        """
        assert parts and parts[0].transfer.target is not None
        region = parts[0].transfer.target.region
        with self._lock:  # also against a lane that is about to retire
            for part in parts:
                part.transfer.num_queued += 1
            lane = self._lanes.get(region.name)
            if lane is None:
                lane = self._lanes[region.name] = _Lane(region, self._run)
            lane.jobs.put(_Push(layers, parts, computed))

    def fence(self, transfer: OutgoingTransfer, passed: Callable[[], object]) -> None:
        """Call ``passed`` when nothing of this transfer is queued or under way: now, or on a thread of the sender.

        It does not wait for others: an engine that runs ahead has queued those of its next step already.
        """
        with self._lock:
            if transfer.num_queued:
                transfer.on_passed.append(passed)
                return
        passed()

    def close(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.jobs.put(None)
        for lane in lanes:
            lane.thread.join()
        self._write_locks.close()

    def _run(self, lane: _Lane) -> None:
        with lane.mapping:
            while (job := self._next(lane)) is not None:
                if lane.is_mapped is None and lane.region.handle:
                    self._map(lane)
                if isinstance(job, _Push):
                    self._push(lane, job)
                else:
                    self._connect(lane)
            lane.mapped = None

    def _map(self, lane: _Lane) -> None:
        """Map the KV there. What keeps it from that is no error: it goes by the host."""
        try:
            with ExitStack() as mapping:
                # its owner sees by the lock that it must not give the memory to others yet
                mapping.enter_context(self._write_locks.held(lane.region, [MAPPED_SLOT]))
                lane.mapped = mapping.enter_context(self._source.mapped(lane.region))
                if lane.mapped is not None:
                    lane.mapping.push(mapping.pop_all())
        except Exception as error:  # noqa: BLE001 - its process may be gone, or the device fail
            logger.info("%s is not mapped here: %s", lane.region.name, error)
        lane.is_mapped = lane.mapped is not None

    def _pass(self, transfer: OutgoingTransfer) -> None:
        """One of its parts is done with."""
        with self._lock:
            transfer.num_queued -= 1
            if transfer.num_queued:
                return
            waiting, transfer.on_passed = transfer.on_passed, []
        for passed in waiting:
            try:
                passed()
            except Exception:  # it must not hold up others, nor end the lane
                logger.exception("what waited for transfer %s failed", transfer.transfer_id)

    def _next(self, lane: _Lane) -> _Job | None:
        """The next job; None where there was none for long, and the lane is gone, or at the end."""
        if lane.ahead:
            return lane.ahead.popleft()
        while True:
            try:
                return lane.jobs.get(timeout=_IDLE_LANE_S if lane.mapped is None else UNMAP_S)
            except queue.Empty:
                pass
            with self._lock:
                if not lane.jobs.empty():
                    return lane.jobs.get()
                if lane.mapped is not None and is_there(lane.region):
                    continue
                if self._lanes.get(lane.region.name) is lane:
                    del self._lanes[lane.region.name]
                    self.sizer.forget(lane.region.name)
                return None

    def _connect(self, lane: _Lane) -> None:
        region = lane.region
        if region.handle and lane.mapped is None:
            return  # nobody is written to: the decode instance reads
        try:
            start = self._clock()
            write = lane.mapped and partial(lane.mapped, range(1), [], [])
            write = write or partial(self._transport.write, region, [])
            write()
            contact = self._clock()
            write()
        except Exception as error:  # noqa: BLE001 - the first push will say so
            logger.debug("no contact with %s yet: %s", region.name, error)
            return
        self.sizer.observe_transfer(region.name, 0, self._clock() - contact)
        self._on_write(0, contact - start)

    def _push(self, lane: _Lane, job: _Push) -> None:
        try:
            if job.computed is not None:
                job.computed.synchronize()
            if self.sizer.fixed is None and (lane.ahead or not lane.jobs.empty()):
                job = self._with_late(lane, job)
            target = job.parts[0].transfer.target
            assert target is not None
            limits = [most for most in (self._source.staged_cells, target.staged_cells) if most is not None]
            in_rounds = job.rounds(min(limits)) if limits and lane.mapped is None else [(job.layers, job.parts)]
            for layers, parts in in_rounds:
                wanted = [part for part in parts if self._may_write(part.transfer, self._clock())]
                if wanted:
                    self._move(lane, layers, wanted, target)
        except TransferError as error:
            for part in job.parts:
                part.transfer.error = part.transfer.error or error
        except Exception as error:  # such as a device that failed in the step, or has no memory for staging
            logger.exception("transfers to %s failed", lane.region.name)
            for part in job.parts:
                part.transfer.error = part.transfer.error or TransferError(f"the copy failed: {error}")
        for part in job.parts:
            self._pass(part.transfer)

    def _with_late(self, lane: _Lane, job: _Push) -> _Push:
        """A push whose turn has come, with those behind it that are computed and can go in its write."""
        while not lane.jobs.empty():
            lane.ahead.append(lane.jobs.get())
        late = list[_Push]()
        for push in lane.ahead:
            if not isinstance(push, _Push) or not (push.computed is None or push.computed.query()):
                break
            late.append(push)
        joined = [job]
        for push in late:
            lane.ahead.popleft()
            joined.append(push)
            while len(joined) > 1 and (both := self._joined(lane, *joined[-2:])) is not None:
                joined[-2:] = [both]
        lane.ahead.extendleft(reversed(joined[1:]))
        return joined[0]

    def _joined(self, lane: _Lane, first: _Push, second: _Push) -> _Push | None:
        """Two pushes as one; None where they are not better off together."""
        if first.layers.stop == second.layers.start and first.parts == second.parts:
            both = _Push(range(first.layers.start, second.layers.stop), first.parts)
        elif first.layers == second.layers:
            blocks: dict[OutgoingTransfer, dict[int, int]] = {}
            for part in (*first.parts, *second.parts):  # what a chunk filled in part is in the next one, too
                blocks.setdefault(part.transfer, {}).update(zip(part.remote, part.local, strict=True))
            parts = [Part(one, list(places.values()), list(places)) for one, places in blocks.items()]
            nbytes = self._source.nbytes(len(first.layers), sum(len(part.local) for part in parts))
            if not self.sizer.is_mostly_handshake(lane.region.name, nbytes):
                return None
            both = _Push(first.layers, parts)
        else:
            return None
        with self._lock:
            for part in (*first.parts, *second.parts):
                part.transfer.num_queued -= 1
            for part in both.parts:
                part.transfer.num_queued += 1
        return both

    def _move(self, lane: _Lane, layers: range, parts: Sequence[Part], target: ReserveReply) -> None:
        """Bring parts over, as one write or one offer."""
        start, offer = self._clock(), parts[0].transfer.offer
        if lane.mapped is not None:
            moved, offer = self._write(layers, parts, target, lane.mapped), None
        else:
            with self._source.stage(layers, [block for part in parts for block in part.local]) as staged:
                if offer is None:
                    moved = self._write(layers, parts, target, None, staged)
                else:
                    moved = self._offer(staged, layers, parts, offer)
        if not moved:
            return
        end = self._clock()
        sizes = [self._source.nbytes(len(layers), len(part.local)) for part in moved]
        total = sum(sizes)
        for part, nbytes in zip(moved, sizes, strict=True):
            transfer, share = part.transfer, nbytes / max(total, 1)
            transfer.num_bytes += nbytes
            transfer.num_writes += 1
            transfer.transfer_s += share * (end - start)
            if transfer.computed_at is not None:
                transfer.wait_s = max(end - transfer.computed_at, 0.0)
                transfer.exposed_s += share * max(end - max(start, transfer.computed_at), 0.0)
        self.sizer.observe_transfer(lane.region.name, total, end - start)
        if offer is None:
            self._on_write(total, end - start)

    def _write(
        self,
        layers: range,
        parts: Sequence[Part],
        target: ReserveReply,
        mapped: RemoteWrite | None,
        staged: StagedKV | None = None,
    ) -> list[Part]:
        """Write what may still be written, from device to device or from what is staged; returns it."""
        # held from before the look at the leases until all is written: see WriteLocks
        with self._write_locks.held(target.region, [part.slot for part in parts]):
            now = self._clock()
            leased = [part for part in parts if self._may_write(part.transfer, now)]
            if not leased:
                return []
            if mapped is not None:
                here = [block for part in leased for block in part.local]
                there = [block for part in leased for block in part.remote]
                mapped(layers, here, there)
                return leased
            assert staged is not None
            pieces, first = list[Piece](), 0
            for part in parts:
                if part in leased:
                    pieces += staged.pieces(first, part.remote, target.num_blocks)
                first += len(part.local)
            self._transport.write(target.region, pieces, [part.transfer.transfer_id for part in leased])
        return leased

    def _offer(
        self,
        staged: StagedKV,
        layers: range,
        parts: Sequence[Part],
        offer: Callable[[KVOffer], KVTaken],
    ) -> list[Part]:
        """Have the decode instance read; returns what it wanted. The others it has given up."""
        readable, source = cast(ReadableKV, staged), cast(ReadableSource, self._source)
        offered, first = list[OfferedKV](), 0
        for part in parts:
            spans = readable.spans(first, len(part.local))
            offered.append(OfferedKV(part.transfer.transfer_id, list(part.remote), spans))
            first += len(part.local)
        taken = offer(KVOffer(source.region, layers.start, layers.stop, offered)).transfer_ids
        for part in parts:
            part.transfer.cancelled |= part.transfer.transfer_id not in taken
        return [part for part in parts if part.transfer.transfer_id in taken]

    @staticmethod
    def _may_write(transfer: OutgoingTransfer, now: float) -> bool:
        if transfer.cancelled or transfer.error is not None:
            return False
        if now >= transfer.deadline:
            transfer.error = TransferError(
                f"the lease of transfer {transfer.transfer_id} ended before its KV was written"
            )
            return False
        return True


class _Lane:
    """The queue and thread of one decode instance, so that one that stalls holds up no other.

    Attributes:
        ahead: jobs that the thread has taken from the queue and not done.
        mapped: writes to the KV there, while it is mapped here. is_mapped: None as long as nobody has tried.
        mapping: ends it with the thread.
    """

    def __init__(self, region: Region, run: Callable[[_Lane], None]) -> None:
        self.region = region
        self.mapped: RemoteWrite | None = None
        self.is_mapped: bool | None = None
        self.mapping = ExitStack()
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.ahead: deque[_Job | None] = deque()
        self.thread = threading.Thread(target=run, args=(self,), name="kv-sender", daemon=True)
        self.thread.start()
