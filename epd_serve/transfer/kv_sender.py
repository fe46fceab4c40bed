"""Grouped KV transfer: a thread pushes each group of layers while the next ones are computed (EPD-Serve 3.3)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.protocol.wire import Region, ReserveReply
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.shared_memory import WriteLocks
from epd_serve.transfer.transport import Piece, TransferError, Transport

logger = logging.getLogger(__name__)

_IDLE_LANE_S = 60.0


class KVSource(Protocol):
    """The memory from which outgoing KV is sent."""

    def stage(self, layers: range, blocks: Sequence[int]) -> None:
        """Copy blocks to memory that a transport can read."""
        ...

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        """Bytes of ``local`` blocks in ``layers``, and where they belong in a slab of ``remote_num_blocks``."""
        ...

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of so many blocks in so many layers on the device: an emulated one's pieces have fewer."""
        ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One request's KV on its way to the decode instance.

    Attributes:
        target: blocks reserved for it; None where the decode instance fetches it by itself.
        deadline: end of the lease; nothing is written after it.
        next_block: index of the first prompt block that is not yet pushed in full.
        computed_at: time at which the prompt's compute had ended.
        transfer_s: time spent copying; of a write that carried several transfers, the share of this one's bytes.
        exposed_s: the part of it after ``computed_at``.
        finished_at: time at which its last write had ended.
    """

    transfer_id: str
    target: ReserveReply | None
    deadline: float
    next_block: int = 0
    cancelled: bool = False
    error: TransferError | None = None
    computed_at: float | None = None
    num_bytes: int = 0
    num_writes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    finished_at: float = 0.0

    @property
    def overlap_ratio(self) -> float:
        """1 − exposed / transfer time: 1 means entirely hidden."""
        return 1.0 - self.exposed_s / self.transfer_s if self.transfer_s else 1.0

    @property
    def wait_s(self) -> float:
        """Seconds from the end of the prompt's compute to the end of its last write."""
        return max(self.finished_at - self.computed_at, 0.0) if self.computed_at is not None else 0.0


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


@dataclass(frozen=True, slots=True)
class _Push:
    layers: range
    parts: Sequence[Part]
    wait_for_compute: Callable[[], None]

    @property
    def region(self) -> Region:
        """The region at the decode instance to which all parts go."""
        target = self.parts[0].transfer.target
        assert target is not None
        return target.region


@dataclass(frozen=True, slots=True)
class _Fence:
    transfer: OutgoingTransfer
    passed: Callable[[OutgoingTransfer], None]


@dataclass(frozen=True, slots=True)
class _Connect:
    region: Region


_Job = _Push | _Fence | _Connect


class KVSender:
    """Pushes to each decode instance in the order given, to several of them at once.

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
            is_new = region.name not in self._lanes
        if is_new:
            self._put(region.name, _Connect(region))

    def push(self, layers: range, parts: Sequence[Part], wait_for_compute: Callable[[], None]) -> None:
        """Queue blocks of ``layers`` as one write; all parts go to one region.

        ``wait_for_compute`` returns once the device has written them.
        """
        assert parts and parts[0].transfer.target is not None
        self._put(parts[0].transfer.target.region.name, _Push(layers, parts, wait_for_compute))

    def fence(self, transfer: OutgoingTransfer, passed: Callable[[OutgoingTransfer], None]) -> None:
        """Call ``passed`` (on a thread of the sender) when nothing of this transfer is under way any more."""
        if transfer.target is None:
            passed(transfer)
        else:
            self._put(transfer.target.region.name, _Fence(transfer, passed))

    def close(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.jobs.put(None)
        for lane in lanes:
            lane.thread.join()
        self._write_locks.close()

    def _put(self, region_name: str, job: _Job) -> None:
        with self._lock:  # also against a lane that is about to retire
            lane = self._lanes.get(region_name)
            if lane is None:
                lane = self._lanes[region_name] = _Lane(region_name, self._run)
            lane.jobs.put(job)

    def _run(self, lane: _Lane) -> None:
        while (job := self._next(lane)) is not None:
            try:
                match job:
                    case _Fence():
                        job.passed(job.transfer)
                    case _Connect():
                        self._connect(lane, job.region)
                    case _Push():
                        self._push(lane, job)
            except Exception:  # a failure must not end the lane: what comes after it waits for its fences
                logger.exception("a transfer to %s failed", lane.region_name)

    def _next(self, lane: _Lane) -> _Job | None:
        """The next job; None where there was none for long, and the lane is gone, or at the end."""
        try:
            return lane.jobs.get(timeout=_IDLE_LANE_S)
        except queue.Empty:
            with self._lock:
                if not lane.jobs.empty():
                    return lane.jobs.get()
                if self._lanes.get(lane.region_name) is lane:
                    del self._lanes[lane.region_name]
                    self.sizer.forget(lane.region_name)
                return None

    def _connect(self, lane: _Lane, region: Region) -> None:
        try:
            start = self._clock()
            self._transport.write(region, [])
            contact = self._clock()
            self._transport.write(region, [])
        except TransferError as error:
            logger.debug("no contact with %s yet: %s", region.name, error)  # the first push will say so
            return
        self.sizer.observe_transfer(lane.region_name, 0, self._clock() - contact)
        self._on_write(0, contact - start)

    def _push(self, lane: _Lane, job: _Push) -> None:
        try:
            job.wait_for_compute()
            # held from before the look at the leases until all is written: see WriteLocks
            with self._write_locks.held(job.region, [part.slot for part in job.parts]):
                start = self._clock()
                parts = [part for part in job.parts if self._may_write(part.transfer, start)]
                sizes = self._write(job.layers, parts) if parts else []
        except TransferError as error:
            for part in job.parts:
                part.transfer.error = part.transfer.error or error
            return
        except Exception as error:  # such as a device that failed in the step, or has no memory for staging
            logger.exception("transfers to %s failed", lane.region_name)
            for part in job.parts:
                part.transfer.error = part.transfer.error or TransferError(f"the copy failed: {error}")
            return
        if not parts:
            return
        end = self._clock()
        for part, nbytes in zip(parts, sizes, strict=True):
            _account(part.transfer, nbytes, nbytes / max(sum(sizes), 1), start, end)
        self.sizer.observe_transfer(lane.region_name, sum(sizes), end - start)
        self._on_write(sum(sizes), end - start)

    def _write(self, layers: range, parts: Sequence[Part]) -> list[int]:
        """Write all parts; return the bytes of each."""
        pieces: list[Piece] = []
        sizes: list[int] = []
        self._source.stage(layers, [block for part in parts for block in part.local])
        for part in parts:
            target = part.transfer.target
            assert target is not None
            own = self._source.pieces(layers, part.local, part.remote, target.num_blocks)
            sizes.append(self._source.nbytes(len(layers), len(part.local)))
            pieces += own
        target = parts[0].transfer.target
        assert target is not None
        self._transport.write(target.region, pieces, [part.transfer.transfer_id for part in parts])
        return sizes

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
    """The queue and thread of one decode instance, so that one that stalls holds up no other."""

    def __init__(self, region_name: str, run: Callable[[_Lane], None]) -> None:
        self.region_name = region_name
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.thread = threading.Thread(target=run, args=(self,), name="kv-sender", daemon=True)
        self.thread.start()


def _account(transfer: OutgoingTransfer, nbytes: int, share: float, start: float, end: float) -> None:
    transfer.num_bytes += nbytes
    transfer.num_writes += 1
    transfer.transfer_s += share * (end - start)
    transfer.finished_at = end
    if transfer.computed_at is not None:
        transfer.exposed_s += share * max(end - max(start, transfer.computed_at), 0.0)
