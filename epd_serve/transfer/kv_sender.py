"""Grouped KV transfer: announce each group of layers while the next ones are computed (EPD-Serve section 3.3)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from device.base import Event
from epd_serve.protocol.wire import KVAnnouncement, KVTaken, Region, ReserveReply, SentKV
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.staging import rounds
from epd_serve.transfer.transport import DeviceBytes, Span, TransferError

logger = logging.getLogger(__name__)

_IDLE_LANE_S = 60.0


class ReadableKV(Protocol):
    """Blocks of some layers in memory that peers can read."""

    def spans(self, first: int, count: int) -> list[Span]:
        """Return the places of ``count`` of the blocks, from number ``first`` on."""
        ...


class KVSource(Protocol):
    """The memory from which outgoing KV is read."""

    @property
    def region(self) -> Region: ...

    @property
    def buffer(self) -> memoryview | DeviceBytes: ...

    @property
    def staged_cells(self) -> int | None:
        """The most layers × blocks that :meth:`stage` takes; None where there is no limit."""
        ...

    def stage(self, layers: range, blocks: Sequence[int]) -> AbstractContextManager[ReadableKV]:
        """A context in which peers can read blocks that are computed. It may wait for others' to end."""
        ...

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of so many blocks in so many layers on the device: an emulated one's pieces have fewer."""
        ...


class DecodePeer(Protocol):
    """The decode instance of a transfer, called from threads of the sender."""

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        """Return when the instance has read what is announced. Raises TransferError."""
        ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One request's KV on its way to the decode instance.

    Attributes:
        peer: the decode instance.
        target: blocks reserved for it; None until there are some.
        next_block: index of the first prompt block that is not yet sent in full.
        computed_at: time at which the prompt's compute had ended.
        transfer_s: time until the peer had read; of an announcement of several transfers, the share of its bytes.
        exposed_s: the part of it after ``computed_at``.
        wait_s: seconds from ``computed_at`` to the end of its last read.
        num_queued: parts of it that the sender has not done with.
        on_passed: to be called when there are none.
    """

    transfer_id: str
    peer: DecodePeer
    target: ReserveReply | None = None
    next_block: int = 0
    cancelled: bool = False
    error: TransferError | None = None
    computed_at: float | None = None
    num_bytes: int = 0
    num_announcements: int = 0
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

    peer: DecodePeer


_Job = _Push | _Connect


class KVSender:
    """Announces KV to each decode instance in the order given, to several of them at once.

    What is late goes together: layers of one step that are computed when their turn comes are one announcement, as
    are steps of the same layers whose bytes take the link no longer than a handshake does. A transfer waits for
    another's bytes for that long at most. Where the size of groups is fixed, so are the announcements.

    A transfer that failed or was cancelled announces nothing more.

    Args:
        clock: monotonic seconds; the same clock that ``computed_at`` is set by.
    """

    def __init__(self, source: KVSource, sizer: GroupSizer, clock: Callable[[], float]) -> None:
        self._source = source
        self.sizer = sizer
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def connect(self, name: str, peer: DecodePeer) -> None:
        """Make the first contact with the instance of that name, and measure the next one; once for each."""
        with self._lock:
            if name not in self._lanes:
                self._lane(name).jobs.put(_Connect(peer))

    def push(self, layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
        """Queue blocks of ``layers`` as one announcement; all parts go to one instance.

        ``computed`` comes when the device has written them; None: it has.
        """
        assert parts and parts[0].transfer.target is not None
        with self._lock:  # also against a lane that is about to retire
            for part in parts:
                part.transfer.num_queued += 1
            self._lane(parts[0].transfer.target.name).jobs.put(_Push(layers, parts, computed))

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

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, self._run)
        return self._lanes[name]

    def _run(self, lane: _Lane) -> None:
        while (job := self._next(lane)) is not None:
            if isinstance(job, _Push):
                self._push(lane, job)
            else:
                self._connect(lane, job.peer)

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
        try:
            return lane.jobs.get(timeout=_IDLE_LANE_S)
        except queue.Empty:
            pass
        with self._lock:
            if not lane.jobs.empty():
                return lane.jobs.get()
            if self._lanes.get(lane.name) is lane:
                del self._lanes[lane.name]
                self.sizer.forget(lane.name)
            return None

    def _connect(self, lane: _Lane, peer: DecodePeer) -> None:
        nothing = KVAnnouncement(self._source.region, 0, 0, [])
        try:
            peer.announce(nothing)
            contact = self._clock()
            peer.announce(nothing)
        except TransferError as error:  # the first push will say so
            logger.debug("no contact with %s yet: %s", lane.name, error)
            return
        self.sizer.observe_transfer(lane.name, 0, self._clock() - contact)

    def _push(self, lane: _Lane, job: _Push) -> None:
        try:
            if job.computed is not None:
                job.computed.synchronize()
            if self.sizer.fixed is None and (lane.ahead or not lane.jobs.empty()):
                job = self._with_late(lane, job)
            target = job.parts[0].transfer.target
            assert target is not None
            limits = [most for most in (self._source.staged_cells, target.staged_cells) if most is not None]
            in_rounds = job.rounds(min(limits)) if limits and not target.maps else [(job.layers, job.parts)]
            for layers, parts in in_rounds:
                wanted = [part for part in parts if not part.transfer.cancelled and part.transfer.error is None]
                if wanted:
                    self._move(lane, layers, wanted, maps=target.maps)
        except TransferError as error:
            for part in job.parts:
                part.transfer.error = part.transfer.error or error
        except Exception as error:  # such as a device that failed in the step, or has no memory for staging
            logger.exception("transfers to %s failed", lane.name)
            for part in job.parts:
                part.transfer.error = part.transfer.error or TransferError(f"the copy failed: {error}")
        for part in job.parts:
            self._pass(part.transfer)

    def _with_late(self, lane: _Lane, job: _Push) -> _Push:
        """A push whose turn has come, with those behind it that are computed and can go with it."""
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
            if not self.sizer.is_mostly_handshake(lane.name, nbytes):
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

    def _move(self, lane: _Lane, layers: range, parts: Sequence[Part], *, maps: bool) -> None:
        """Announce parts, and return when they are read. ``maps``: the peer reads them on the device itself."""
        start = self._clock()
        if maps:
            moved = self._announce(layers, parts, None)
        else:
            with self._source.stage(layers, [block for part in parts for block in part.local]) as staged:
                moved = self._announce(layers, parts, staged)
        if not moved:
            return
        end = self._clock()
        sizes = [self._source.nbytes(len(layers), len(part.local)) for part in moved]
        total = sum(sizes)
        for part, nbytes in zip(moved, sizes, strict=True):
            transfer, share = part.transfer, nbytes / max(total, 1)
            transfer.num_bytes += nbytes
            transfer.num_announcements += 1
            transfer.transfer_s += share * (end - start)
            if transfer.computed_at is not None:
                transfer.wait_s = max(end - transfer.computed_at, 0.0)
                transfer.exposed_s += share * max(end - max(start, transfer.computed_at), 0.0)
        self.sizer.observe_transfer(lane.name, total, end - start)

    def _announce(self, layers: range, parts: Sequence[Part], staged: ReadableKV | None) -> list[Part]:
        """Have the decode instance read; return what it wanted. The others it has given up."""
        sent, first = list[SentKV](), 0
        for part in parts:
            spans = [] if staged is None else staged.spans(first, len(part.local))
            blocks = list(part.local) if staged is None else []
            sent.append(SentKV(part.transfer.transfer_id, list(part.remote), spans, blocks))
            first += len(part.local)
        announcement = KVAnnouncement(self._source.region, layers.start, layers.stop, sent)
        taken = parts[0].transfer.peer.announce(announcement).transfer_ids
        for part in parts:
            part.transfer.cancelled |= part.transfer.transfer_id not in taken
        return [part for part in parts if part.transfer.transfer_id in taken]


class _Lane:
    """The queue and thread of one decode instance, so that one that stalls holds up no other.

    Attributes:
        ahead: jobs that the thread has taken from the queue and not done.
    """

    def __init__(self, name: str, run: Callable[[_Lane], None]) -> None:
        self.name = name
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.ahead: deque[_Job | None] = deque()
        self.thread = threading.Thread(target=run, args=(self,), name="kv-sender", daemon=True)
        self.thread.start()
