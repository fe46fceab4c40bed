"""Grouped KV transfer: announce each group of layers while the next is computed (EPD-Serve section 3.3).

The decode instance's side is :mod:`epd_serve.transfer.kv_receiver`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class KVBlocks(Protocol):
    """The KV cache of an instance, as its transfers see it.

    ``staged_cells``: most layers × blocks in one call of :meth:`stage` or :meth:`land`; None: no limit.
    """

    region: Region
    staged_cells: int | None

    @property
    def buffer(self) -> memoryview | DeviceBytes:
        """The memory that reads fill."""
        ...

    def stage(self, layers: range, parts: Sequence[Sequence[int]]) -> AbstractContextManager[list[list[Span]]]:
        """Make computed blocks readable by peers within the context; give the spans of each part's blocks.

        May wait for staging memory.
        """
        ...

    def land(self, layers: range, parts: Sequence[Sequence[int]]) -> AbstractContextManager[list[list[Span]]]:
        """Give the spans in ``buffer`` to read each part's blocks into; the model sees them after the context."""
        ...

    def read_mapped(self, region: Region, layers: range, source: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks of another instance, on a device that this one maps. Raises TransferError."""
        ...

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Return the KV bytes on the device, which on an emulated device exceed the bytes moved."""
        ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """The transfer of one request's KV to a decode instance. A subclass implements :meth:`announce`.

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

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        """Return when the decode instance has read the announced KV. Called on threads. Raises TransferError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one transfer: their ids here and at the decode instance."""

    transfer: OutgoingTransfer
    local: Sequence[int]
    remote: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Push:
    """``queued`` are the transfers of the pushes that were merged into this one."""

    layers: range
    parts: Sequence[Part]
    queued: Sequence[OutgoingTransfer]
    computed: Event | None = None

    def rounds(self, staged_cells: Sequence[int | None]) -> Iterator[tuple[range, list[Part]]]:
        """Cut the push into rounds of at most so many cells, skipping transfers that have ended."""
        starts = list(accumulate((len(part.local) for part in self.parts), initial=0))
        most_cells = min(filter(None, staged_cells), default=len(self.layers) * starts[-1])
        for layers, numbers in rounds(self.layers, starts[-1], most_cells):
            inside = list[Part]()
            for part, start in zip(self.parts, starts, strict=False):
                own = slice(max(numbers.start - start, 0), max(numbers.stop - start, 0))
                if part.local[own] and not part.transfer.cancelled and part.transfer.error is None:
                    inside.append(Part(part.transfer, part.local[own], part.remote[own]))
            if inside:
                yield layers, inside


@dataclass(slots=True, eq=False)
class _Lane:
    """The pushes to one decode instance, which a thread sends in order: a stalled instance delays only itself."""

    changed: threading.Condition
    thread: threading.Thread
    pushes: deque[_Push] = field(default_factory=deque)


class KVSender:
    """Announces KV, in order, to each decode instance over a lane of its own.

    Unless the group size is fixed, a lane merges computed pushes in its queue: consecutive groups of one step, and
    steps of the same layers that take the link no longer than a handshake. So a transfer waits no longer than that
    for the bytes of another.

    A failed or cancelled transfer announces nothing more.
    """

    def __init__(self, source: KVBlocks, sizer: GroupSizer, clock: Callable[[], float]) -> None:
        self._source = source
        self.sizer = sizer
        self._clock = clock
        self._lock = threading.RLock()
        self._lanes: dict[str, _Lane] = {}
        self._is_closed = False

    def connect(self, transfer: OutgoingTransfer) -> _Lane:
        """Return the lane to a transfer's decode instance. A new one measures the handshake first."""
        assert transfer.target is not None
        name = transfer.target.name
        with self._lock:
            if name not in self._lanes:
                thread = threading.Thread(target=self._run, args=(name, transfer), name="kv-sender", daemon=True)
                self._lanes[name] = _Lane(threading.Condition(self._lock), thread)
                thread.start()
            return self._lanes[name]

    def push(self, layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
        """Queue blocks of ``layers`` as one announcement to one instance.

        ``computed``: when the device has written the blocks; None if it has.
        """
        with self._lock:  # also held by a lane that retires
            for part in parts:
                part.transfer.num_queued += 1
            lane = self.connect(parts[0].transfer)
            lane.pushes.append(_Push(layers, parts, [part.transfer for part in parts], computed))
            lane.changed.notify()

    def fence(self, transfer: OutgoingTransfer, sent: Callable[[], object]) -> None:
        """Call ``sent``, now or on a thread of the sender, once nothing of the transfer is queued or under way."""
        with self._lock:
            if transfer.num_queued:
                transfer.on_sent.append(sent)
                return
        sent()

    def close(self) -> None:
        """Send the queued pushes and end the lanes."""
        with self._lock:
            self._is_closed = True
            lanes = list(self._lanes.values())
            for lane in lanes:
                lane.changed.notify()
        for lane in lanes:
            lane.thread.join()

    # ------------------------------------------------------------------ on the thread of a lane

    def _run(self, name: str, first: OutgoingTransfer) -> None:
        lane = self._lanes[name]
        self._measure_handshake(name, first)
        while (push := self._next_push(name, lane)) is not None:
            try:
                if push.computed is not None:
                    push.computed.synchronize()
                if self.sizer.fixed is None:
                    push = self._merge_computed(name, lane, push)
                self._send(name, push)
            except Exception as error:  # such as a device that failed in the step or is out of memory
                failure = error
                if not isinstance(failure, TransferError):
                    logger.exception("transfers to %s failed", name)
                    failure = TransferError(f"the copy failed: {error}")
                for part in push.parts:
                    part.transfer.error = part.transfer.error or failure
            for transfer in push.queued:
                self._finish_part(transfer)

    def _measure_handshake(self, name: str, transfer: OutgoingTransfer) -> None:
        nothing = KVAnnouncement(self._source.region, 0, 0, [])
        try:
            transfer.announce(nothing)
            contact = self._clock()
            transfer.announce(nothing)
            self.sizer.observe_transfer(name, 0, self._clock() - contact)
        except Exception as error:  # noqa: BLE001 - the first push reports it
            logger.debug("cannot contact %s yet: %s", name, error)

    def _next_push(self, name: str, lane: _Lane) -> _Push | None:
        """Wait for the next push; None at the end, or when an idle lane retires."""
        with self._lock:
            lane.changed.wait_for(lambda: lane.pushes or self._is_closed, _IDLE_LANE_S)
            if lane.pushes:
                return lane.pushes.popleft()
            del self._lanes[name]
            self.sizer.forget(name)
            return None

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

    def _merge_computed(self, name: str, lane: _Lane, first: _Push) -> _Push:
        """Merge a computed push with the computed pushes behind it."""
        computed = list[_Push]()
        for push in list(lane.pushes):
            if push.computed is not None and not push.computed.query():
                break
            computed.append(push)
        merged = [first]
        for push in computed:
            lane.pushes.popleft()  # only this thread takes pushes out
            merged.append(push)
            while len(merged) > 1 and (both := self._merge(name, *merged[-2:])) is not None:
                merged[-2:] = [both]
        lane.pushes.extendleft(reversed(merged[1:]))
        return merged[0]

    def _merge(self, name: str, first: _Push, second: _Push) -> _Push | None:
        """Return two computed pushes as one, or None if they are better sent apart."""
        queued = [*first.queued, *second.queued]
        if first.layers.stop == second.layers.start and first.parts == second.parts:
            return _Push(range(first.layers.start, second.layers.stop), first.parts, queued)
        if first.layers != second.layers:
            return None
        blocks: dict[OutgoingTransfer, dict[int, int]] = {}
        for part in (*first.parts, *second.parts):  # a partly filled block is in the next chunk, too
            blocks.setdefault(part.transfer, {}).update(zip(part.remote, part.local, strict=True))
        parts = [Part(one, list(places.values()), list(places)) for one, places in blocks.items()]
        nbytes = self._source.nbytes(len(first.layers), sum(len(part.local) for part in parts))
        return _Push(first.layers, parts, queued) if self.sizer.is_mostly_handshake(name, nbytes) else None

    def _send(self, name: str, push: _Push) -> None:
        """Announce a push in rounds that fit the staging memory of both ends; return once it is read."""
        target = push.parts[0].transfer.target
        assert target is not None
        limits = [] if target.maps else [self._source.staged_cells, target.staged_cells]
        for layers, parts in push.rounds(limits):
            start = self._clock()
            # a decode instance that maps this device's memory reads the blocks themselves
            staging = nullcontext() if target.maps else self._source.stage(layers, [part.local for part in parts])
            with staging as spans:
                sent = [
                    SentKV(part.transfer.transfer_id, list(part.remote), [], list(part.local))
                    if spans is None
                    else SentKV(part.transfer.transfer_id, list(part.remote), spans[number])
                    for number, part in enumerate(parts)
                ]
                announcement = KVAnnouncement(self._source.region, layers.start, layers.stop, sent)
                taken = parts[0].transfer.announce(announcement).transfer_ids
            end = self._clock()
            for part in parts:  # the decode instance has given up the others
                part.transfer.cancelled |= part.transfer.transfer_id not in taken
            sizes = {
                part.transfer: self._source.nbytes(len(layers), len(part.local))
                for part in parts
                if part.transfer.transfer_id in taken
            }
            total = sum(sizes.values())
            for transfer, nbytes in sizes.items():
                share = nbytes / max(total, 1)
                transfer.num_bytes += nbytes
                transfer.num_announcements += 1
                transfer.transfer_s += share * (end - start)
                if transfer.computed_at is not None:
                    transfer.wait_s = max(end - transfer.computed_at, 0.0)
                    transfer.exposed_s += share * max(end - max(start, transfer.computed_at), 0.0)
            if sizes:
                self.sizer.observe_transfer(name, total, end - start)
