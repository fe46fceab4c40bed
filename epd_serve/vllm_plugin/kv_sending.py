"""P's side of KV hand-overs: which D waits for which prompt. The native engine's sender writes.

Blocks go out in groups of layers while the next layers are computed; groups that are late go as one write.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from epd_serve.protocol.engine_notices import AnyNotice, KVUnwanted, KVWanted
from epd_serve.protocol.wire import Region, ReserveReply
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.reservation import Tombstones
from epd_serve.transfer.transport import Piece, Transport
from epd_serve.vllm_plugin.kv_layout import LayerMemory

logger = logging.getLogger("vllm.epd_serve")

_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The part of a prompt that one step computes.

    Attributes:
        prompt: checksum of the whole prompt (:func:`epd_serve.vllm_plugin.kv.prompt_checksum`).
        first_block: number of the first of ``blocks`` in the prompt.
        last: whether the prompt ends with it.
    """

    request_id: str
    transfer_id: str
    prompt: str
    first_block: int
    blocks: list[int]
    num_tokens: int
    last: bool


@dataclass(slots=True, eq=False)
class _Transfer:
    out: OutgoingTransfer
    prompt: str = ""
    target: KVWanted | None = None
    waiting: list[tuple[range, Chunk, bool]] = field(default_factory=list)
    outcome: str | None = None
    request_id: str = ""
    finished_at: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Staged:
    """Blocks of some layers, where they are."""

    memory: Sequence[LayerMemory]
    layers: range
    blocks: Sequence[int]

    def pieces(self, first: int, remote: Sequence[int], remote_num_blocks: int) -> list[Piece]:
        own, pieces = self.blocks[first : first + len(remote)], []
        for layer in self.layers:
            memory = self.memory[layer]
            start = layer * remote_num_blocks * memory.planes * memory.block_bytes
            pieces += memory.pieces(own, remote, start, remote_num_blocks)
        return pieces


class _Memory:
    """:class:`~epd_serve.transfer.kv_sender.KVSource` of caches in host memory."""

    staged_cells = None

    def __init__(self, layers: Sequence[LayerMemory]) -> None:
        self._layers = layers

    @contextmanager
    def stage(self, layers: range, blocks: Sequence[int]) -> Iterator[_Staged]:
        yield _Staged(self._layers, layers, blocks)

    def mapped(self, region: Region) -> AbstractContextManager[None]:
        return nullcontext()

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks * self._layers[0].planes * self._layers[0].block_bytes


class KVHandOvers:
    """Transfers by id. ``push`` and ``finish`` come from the engine, ``handle`` from D's connections.

    Args:
        lease_s: how long the blocks of a finished prompt are kept for a D that has not asked for them.
        trace: directory for a record of each transfer; None: none is written.

    Attributes:
        last_link: the link that was used last; "" before.
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[LayerMemory],
        sizer: GroupSizer,
        *,
        lease_s: float = 60.0,
        trace: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = layers
        self._lease_s = lease_s
        self._clock = clock
        self._sender = KVSender(transport, _Memory(layers), sizer, clock)
        self._trace = None if trace is None else _new_trace(trace)
        self._lock = threading.RLock()  # what has nothing under way ends where it is asked
        self._transfers: dict[str, _Transfer] = {}
        #: Transfers that are given up, here or by D, with the reason.
        self._refused: Tombstones[str] = Tombstones()
        self._sent: set[str] = set()
        self._news = threading.Event()
        self.last_link = ""

    # ------------------------------------------------------------------ the engine's thread

    def begin(self, chunk: Chunk) -> None:
        """A chunk is about to be computed."""
        with self._lock:
            transfer = self._of(chunk.transfer_id)
            transfer.request_id, transfer.prompt = chunk.request_id, chunk.prompt
            self._check(chunk.transfer_id, transfer)

    def push(self, layers: range, chunk: Chunk, *, last: bool) -> None:
        """These layers of a chunk are computed; ``last``: with them, the chunk is."""
        with self._lock:
            transfer = self._transfers.get(chunk.transfer_id)
            if transfer is None or transfer.outcome is not None:
                return
            if last and chunk.last:
                transfer.out.computed_at = self._clock()
            if transfer.target is None:
                transfer.waiting.append((layers, chunk, last))
            elif transfer.out.error is not None:
                self._end(chunk.transfer_id, transfer, str(transfer.out.error))
            else:
                self._send(transfer, transfer.target, layers, chunk, last)

    def finish(self, transfer_id: str, *, computed: bool) -> None:
        """The engine is through with the request; its blocks stay until :meth:`take_sent` names it if it was
        ``computed``, and are gone now if it was not."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if not computed:
                self._refused.add(transfer_id, "the prompt was not computed to its end")
            if transfer is None:
                return
            transfer.finished_at = self._clock()
            if not computed:
                transfer.request_id = ""
            if transfer.outcome is not None:
                self._drop(transfer_id, transfer)
            elif refusal := self._refused.get(transfer_id):
                self._end(transfer_id, transfer, refusal)

    def wait(self, timeout_s: float) -> None:
        """Until blocks are not needed any more since the last call, while some are kept; at most ``timeout_s``."""
        with self._lock:
            keeps_some = any(one.finished_at is not None for one in self._transfers.values())
        if keeps_some and self._news.wait(timeout_s):
            self._news.clear()

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not needed any more, since the last call."""
        now = self._clock()
        with self._lock:
            for transfer_id, transfer in list(self._transfers.items()):
                is_old = transfer.finished_at is not None and now - transfer.finished_at > self._lease_s
                if is_old and transfer.target is None:
                    self._end(transfer_id, transfer, "nobody asked for it in time")
            sent, self._sent = self._sent, set()
            return sent

    # ------------------------------------------------------------------ D's connections

    def handle(self, notice: AnyNotice, has_left: Callable[[], bool]) -> str:
        """For a :class:`~epd_serve.vllm_plugin.notices.NoticeServer`; waits until all is written."""
        if isinstance(notice, KVUnwanted):
            self._give_up(notice.transfer_id)
            return ""
        if not isinstance(notice, KVWanted):
            return f"an instance that hands KV over knows no {type(notice).__name__}"
        if notice.num_layers != len(self._layers) or notice.block_bytes != self._layers[0].block_bytes:
            return f"KV caches differ: {notice.num_layers} layers, blocks of {notice.block_bytes} bytes"
        with self._lock:
            transfer = self._of(notice.transfer_id)
            transfer.target = notice
            block_bytes = notice.num_layers * notice.planes * notice.block_bytes
            num_blocks = notice.region.nbytes // block_bytes
            transfer.out.target = ReserveReply(notice.block_ids, 0, notice.region, num_blocks)
            self._check(notice.transfer_id, transfer)
            if refusal := self._refused.get(notice.transfer_id):
                self._end(notice.transfer_id, transfer, refusal)
            waiting, transfer.waiting = transfer.waiting, []
            for work in waiting:
                self._send(transfer, notice, *work)
        asked_at = self._clock()
        while not transfer.done.wait(_LOOK_S):
            late = transfer.request_id == "" and self._clock() - asked_at > self._lease_s
            if late or has_left():
                self._give_up(notice.transfer_id)
        return transfer.outcome or ""

    def _give_up(self, transfer_id: str) -> None:
        with self._lock:
            self._refused.add(transfer_id, "it is not wanted any more")
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                self._end(transfer_id, transfer, "it is not wanted any more")

    # ------------------------------------------------------------------ with the lock held

    def _of(self, transfer_id: str) -> _Transfer:
        if transfer_id not in self._transfers:
            out = OutgoingTransfer(transfer_id, target=None, deadline=math.inf)
            self._transfers[transfer_id] = _Transfer(out)
        return self._transfers[transfer_id]

    def _check(self, transfer_id: str, transfer: _Transfer) -> None:
        target = transfer.target
        if (
            target is not None
            and transfer.prompt
            and target.prompt != transfer.prompt
            and transfer.outcome is None
        ):
            self._end(transfer_id, transfer, "P and D have made different prompts of the request")

    def _end(self, transfer_id: str, transfer: _Transfer, outcome: str) -> None:
        if transfer.outcome is None:
            transfer.outcome = outcome
        transfer.waiting, transfer.out.cancelled = [], True
        transfer.done.set()
        if transfer.finished_at is not None or not transfer.request_id:
            self._drop(transfer_id, transfer)

    def _drop(self, transfer_id: str, transfer: _Transfer) -> None:
        if self._transfers.pop(transfer_id, None) is not None and transfer.request_id:
            self._sent.add(transfer.request_id)
            self._news.set()

    # ------------------------------------------------------------------ writing

    def _send(self, transfer: _Transfer, target: KVWanted, layers: range, chunk: Chunk, last: bool) -> None:
        """Have it written; hold the lock."""
        ahead = target.first_block - chunk.first_block  # blocks that D has already
        local = chunk.blocks[max(0, ahead) :]
        remote = target.block_ids[max(0, -ahead) :][: len(local)]
        if remote:
            self.last_link = target.region.name
            self._sender.push(layers, [Part(transfer.out, local[: len(remote)], remote)])
        if last and chunk.last:
            self._sender.fence(transfer.out, partial(self._written, transfer))

    def _written(self, transfer: _Transfer) -> None:
        with self._lock:
            if transfer.outcome is None:
                self._record(transfer.out)
                self._end(transfer.out.transfer_id, transfer, str(transfer.out.error or ""))

    def _record(self, out: OutgoingTransfer) -> None:
        if self._trace is None:
            return
        record = {
            "transfer_id": out.transfer_id,
            "bytes": out.num_bytes,
            "writes": out.num_writes,
            "transfer_s": round(out.transfer_s, 6),
            "exposed_s": round(out.wait_s, 6),
            "overlap": round(1 - min(1.0, out.wait_s / out.transfer_s), 4) if out.transfer_s else 0.0,
        }
        try:
            with self._trace.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # no reason to hand nothing over
            logger.warning("the record of transfer %s cannot be written: %s", out.transfer_id, error)

    def check_integrity(self) -> None:
        """Raise AssertionError unless nothing is left of transfers that have ended."""
        with self._lock:
            open_ones = [one for one in self._transfers.values() if one.outcome is not None and one.finished_at]
            assert not open_ones, f"{len(open_ones)} ended transfers are kept"


def _new_trace(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"vllm-kv-{time.time_ns()}.jsonl"
    file.touch()
    return file
