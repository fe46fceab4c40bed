"""Grouped KV transfer: a thread pushes each group of layers while the next ones are computed (EPD-Serve 3.3)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.protocol.wire import ReserveReply
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.transport import Piece, TransferError, Transport

logger = logging.getLogger(__name__)


class KVSource(Protocol):
    """Where outgoing KV lies."""

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]: ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One request's KV on its way to the decode instance.

    Attributes:
        deadline: when the lease ends; nothing is written after it.
        next_block: index of the first prompt block that is not yet pushed in full.
        transfer_s: time spent copying. exposed_s: the part of it after the prompt's compute had ended.
    """

    transfer_id: str
    target: ReserveReply
    deadline: float
    next_block: int = 0
    cancelled: bool = False
    error: TransferError | None = None
    num_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def overlap_ratio(self) -> float:
        """1 − exposed / transfer time: 1 means entirely hidden."""
        return 1.0 - min(self.exposed_s / self.transfer_s, 1.0) if self.transfer_s else 1.0


@dataclass(frozen=True, slots=True)
class _Push:
    transfer: OutgoingTransfer
    layers: range
    local: Sequence[int]
    remote: Sequence[int]
    queued_at: float
    wait_for_compute: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Fence:
    transfer: OutgoingTransfer
    queued_at: float
    passed: Callable[[OutgoingTransfer], None]


class KVSender:
    """Pushes in the order given. A transfer that failed or was cancelled writes nothing more.

    Args:
        clock: monotonic seconds; the same clock that deadlines are set by.
    """

    def __init__(
        self, transport: Transport, source: KVSource, sizer: GroupSizer, clock: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._source = source
        self.sizer = sizer
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Push | _Fence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def push(
        self,
        transfer: OutgoingTransfer,
        layers: range,
        local: Sequence[int],
        remote: Sequence[int],
        wait_for_compute: Callable[[], None],
    ) -> None:
        """Queue ``local`` blocks of ``layers``; ``wait_for_compute`` returns once the device has written them."""
        self._jobs.put(_Push(transfer, layers, local, remote, self._clock(), wait_for_compute))

    def fence(self, transfer: OutgoingTransfer, passed: Callable[[OutgoingTransfer], None]) -> None:
        """Call ``passed`` (on the sender's thread) when nothing of this transfer is under way any more."""
        self._jobs.put(_Fence(transfer, self._clock(), passed))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, _Fence):
                    if job.transfer.transfer_s:
                        job.transfer.exposed_s = self._clock() - job.queued_at
                    job.passed(job.transfer)
                elif not job.transfer.cancelled and job.transfer.error is None:
                    self._push(job)
            except TransferError as error:
                job.transfer.error = error
            except Exception as error:  # a failed copy must fail its transfer, not all that come after it
                logger.exception("transfer %s failed", job.transfer.transfer_id)
                job.transfer.error = TransferError(f"the copy failed: {error}")

    def _push(self, job: _Push) -> None:
        transfer = job.transfer
        job.wait_for_compute()
        start = self._clock()
        if start >= transfer.deadline:
            raise TransferError(f"the lease of transfer {transfer.transfer_id} ended before its KV was written")
        pieces = self._source.pieces(job.layers, job.local, job.remote, transfer.target.num_blocks)
        self._transport.write(transfer.target.region, pieces)
        seconds = self._clock() - start
        nbytes = sum(data.nbytes for _, data in pieces)
        transfer.num_bytes += nbytes
        transfer.transfer_s += seconds
        self.sizer.observe_transfer(nbytes, seconds, start - job.queued_at)
