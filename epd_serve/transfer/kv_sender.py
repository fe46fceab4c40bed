"""Grouped KV transfer: announce each group of layers while the next is computed (EPD-Serve section 3.3)."""

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
from epd_serve.transfer.transport import Span, TransferError

logger = logging.getLogger(__name__)

_IDLE_LANE_S = 60.0


class ReadableKV(Protocol):
    """Blocks in memory that peers can read."""

    def spans(self, first: int, count: int) -> list[Span]:
        """Return the spans of blocks ``first`` to ``first + count``."""
        ...


class KVSource(Protocol):
    """The memory that outgoing KV is read from.

    ``staged_cells``: most layers × blocks in one call of :meth:`stage`; None: no limit.
    """

    region: Region
    staged_cells: int | None

    def stage(self, layers: range, blocks: Sequence[int]) -> AbstractContextManager[ReadableKV]:
        """Make computed blocks readable by peers within the context. May wait for staging memory."""
        ...

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Return the KV bytes on the device, which on an emulated device exceed the bytes moved."""
        ...


class DecodePeer(Protocol):
    """The decode instance of a transfer, called from threads of the sender."""

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        """Return when the instance has read the announced KV. Raises TransferError."""
        ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """The transfer of one request's KV to a decode instance.

    Attributes:
        target: blocks reserved at the decode instance, None before the reservation.
        next_block: index of the first prompt block not yet sent in full.
        computed_at: when the prompt's compute ended.
        transfer_s: seconds of its reads; an announcement of several transfers is shared by bytes.
        exposed_s: the part of ``transfer_s`` after ``computed_at``.
        wait_s: seconds from ``computed_at`` to the end of its last read.
        num_queued: unfinished parts in the sender.
        on_sent: called when ``num_queued`` becomes 0.
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
    on_sent: list[Callable[[], object]] = field(default_factory=list)

    @property
    def overlap_ratio(self) -> float:
        """1 − exposed / transfer time; 1 means fully hidden."""
        return 1.0 - self.exposed_s / self.transfer_s if self.transfer_s else 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one transfer: their ids here and at the decode instance."""

    transfer: OutgoingTransfer
    local: Sequence[int]
    remote: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Push:
    layers: range
    parts: Sequence[Part]
    computed: Event | None = None

    def rounds(self, most_cells: int) -> Iterator[tuple[range, list[Part]]]:
        """Cut the push into rounds of at most ``most_cells`` cells."""
        starts = list(accumulate((len(part.local) for part in self.parts), initial=0))
        for layers, numbers in rounds(self.layers, starts[-1], most_cells):
            inside = list[Part]()
            for part, start in zip(self.parts, starts, strict=False):
                own = slice(max(numbers.start - start, 0), max(numbers.stop - start, 0))
                if part.local[own]:
                    inside.append(Part(part.transfer, part.local[own], part.remote[own]))
            yield layers, inside


#: A peer alone is contacted for the first time.
_Job = _Push | DecodePeer


class KVSender:
    """Announces KV, in order, to each decode instance over a lane of its own.

    Unless the group size is fixed, a lane merges computed pushes in its queue: consecutive groups of one step, and
    steps of the same layers that take the link no longer than a handshake. So a transfer waits no longer than that
    for the bytes of another.

    A failed or cancelled transfer announces nothing more.
    """

    def __init__(self, source: KVSource, sizer: GroupSizer, clock: Callable[[], float]) -> None:
        self._source = source
        self.sizer = sizer
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def connect(self, name: str, peer: DecodePeer) -> None:
        """Contact an instance for the first time and measure the handshake, unless it has a lane."""
        with self._lock:
            if name not in self._lanes:
                self._lane(name).jobs.put(peer)

    def push(self, layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
        """Queue blocks of ``layers`` as one announcement to one instance.

        ``computed``: when the device has written the blocks; None if it has.
        """
        assert parts and parts[0].transfer.target is not None
        with self._lock:  # also held by a lane that retires
            for part in parts:
                part.transfer.num_queued += 1
            self._lane(parts[0].transfer.target.name).jobs.put(_Push(layers, parts, computed))

    def fence(self, transfer: OutgoingTransfer, sent: Callable[[], object]) -> None:
        """Call ``sent``, now or on a thread of the sender, once nothing of the transfer is queued or under way."""
        with self._lock:
            if transfer.num_queued:
                transfer.on_sent.append(sent)
                return
        sent()

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
        while (job := self._next_job(lane)) is not None:
            if isinstance(job, _Push):
                self._push(lane, job)
            else:
                self._connect(lane, job)

    def _finish_part(self, transfer: OutgoingTransfer) -> None:
        with self._lock:
            transfer.num_queued -= 1
            if transfer.num_queued:
                return
            waiting, transfer.on_sent = transfer.on_sent, []
        for sent in waiting:
            try:
                sent()
            except Exception:  # must not end the lane
                logger.exception("a callback of transfer %s failed", transfer.transfer_id)

    def _next_job(self, lane: _Lane) -> _Job | None:
        """Return the next job; None at the end, or when an idle lane retires."""
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
        except TransferError as error:  # the first push reports it
            logger.debug("cannot contact %s yet: %s", lane.name, error)
            return
        self.sizer.observe_transfer(lane.name, 0, self._clock() - contact)

    def _push(self, lane: _Lane, job: _Push) -> None:
        try:
            if job.computed is not None:
                job.computed.synchronize()
            if self.sizer.fixed is None and (lane.ahead or not lane.jobs.empty()):
                job = self._merge_computed(lane, job)
            target = job.parts[0].transfer.target
            assert target is not None
            limits = [most for most in (self._source.staged_cells, target.staged_cells) if most is not None]
            in_rounds = job.rounds(min(limits)) if limits and not target.maps else [(job.layers, job.parts)]
            for layers, parts in in_rounds:
                wanted = [part for part in parts if not part.transfer.cancelled and part.transfer.error is None]
                if wanted:
                    self._send(lane, layers, wanted, maps=target.maps)
        except TransferError as error:
            for part in job.parts:
                part.transfer.error = part.transfer.error or error
        except Exception as error:  # such as a device that failed in the step or is out of memory
            logger.exception("transfers to %s failed", lane.name)
            for part in job.parts:
                part.transfer.error = part.transfer.error or TransferError(f"the copy failed: {error}")
        for part in job.parts:
            self._finish_part(part.transfer)

    def _merge_computed(self, lane: _Lane, job: _Push) -> _Push:
        """Merge the next push with the computed pushes behind it."""
        while not lane.jobs.empty():
            lane.ahead.append(lane.jobs.get())
        computed = list[_Push]()
        for push in lane.ahead:
            if not isinstance(push, _Push) or not (push.computed is None or push.computed.query()):
                break
            computed.append(push)
        merged = [job]
        for push in computed:
            lane.ahead.popleft()
            merged.append(push)
            while len(merged) > 1 and (both := self._merge(lane, *merged[-2:])) is not None:
                merged[-2:] = [both]
        lane.ahead.extendleft(reversed(merged[1:]))
        return merged[0]

    def _merge(self, lane: _Lane, first: _Push, second: _Push) -> _Push | None:
        """Return two pushes as one, or None if they are better sent apart."""
        if first.layers.stop == second.layers.start and first.parts == second.parts:
            both = _Push(range(first.layers.start, second.layers.stop), first.parts)
        elif first.layers == second.layers:
            blocks: dict[OutgoingTransfer, dict[int, int]] = {}
            for part in (*first.parts, *second.parts):  # a partly filled block is in the next chunk, too
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

    def _send(self, lane: _Lane, layers: range, parts: Sequence[Part], *, maps: bool) -> None:
        """Announce parts and return once they are read; ``maps``: the peer reads them from the device."""
        start = self._clock()
        if maps:
            sent = self._announce(layers, parts, None)
        else:
            with self._source.stage(layers, [block for part in parts for block in part.local]) as staged:
                sent = self._announce(layers, parts, staged)
        if not sent:
            return
        end = self._clock()
        sizes = [self._source.nbytes(len(layers), len(part.local)) for part in sent]
        total = sum(sizes)
        for part, nbytes in zip(sent, sizes, strict=True):
            transfer, share = part.transfer, nbytes / max(total, 1)
            transfer.num_bytes += nbytes
            transfer.num_announcements += 1
            transfer.transfer_s += share * (end - start)
            if transfer.computed_at is not None:
                transfer.wait_s = max(end - transfer.computed_at, 0.0)
                transfer.exposed_s += share * max(end - max(start, transfer.computed_at), 0.0)
        self.sizer.observe_transfer(lane.name, total, end - start)

    def _announce(self, layers: range, parts: Sequence[Part], staged: ReadableKV | None) -> list[Part]:
        """Have the decode instance read the parts; return those it read. It has given up the others."""
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
    """The queue and thread of one decode instance, so that a stalled instance delays only itself.

    Attributes:
        ahead: jobs taken from the queue and not started.
    """

    def __init__(self, name: str, run: Callable[[_Lane], None]) -> None:
        self.name = name
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.ahead: deque[_Job | None] = deque()
        self.thread = threading.Thread(target=run, args=(self,), name="kv-sender", daemon=True)
        self.thread.start()
