"""P's side of KV hand-overs: which D waits for which prompt. The native engine's sender writes.

Blocks go out in groups of layers while the next layers are computed; groups that are late go as one write.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from epd_serve.protocol.engine_notices import AnyNotice, KVUnwanted, KVWanted
from epd_serve.protocol.wire import Region, ReserveReply
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.transport import Piece, Transport
from epd_serve.vllm_plugin.kv_layout import LayerMemory, remote_pieces, runs_of

logger = logging.getLogger("vllm.epd_serve")

_LOOK_S = 0.1
_MAX_UNWANTED = 4096


@dataclass(slots=True)
class Chunk:
    """Computed blocks of one prompt: from ``first_block`` on, in these blocks of P. ``last``: they end it."""

    first_block: int
    blocks: list[int]
    last: bool


@dataclass(slots=True)
class _Work:
    layers: range
    chunk: Chunk
    last: bool


@dataclass(slots=True, eq=False)
class _Transfer:
    out: OutgoingTransfer
    prompt: str = ""
    target: KVWanted | None = None
    waiting: list[_Work] = field(default_factory=list)
    outcome: str | None = None
    request_id: str = ""
    finished_at: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Staged:
    """Blocks of some layers, where they are."""

    def __init__(self, memory: Sequence[LayerMemory], layers: range, blocks: Sequence[int]) -> None:
        self._memory = memory
        self._layers = layers
        self._blocks = blocks

    def pieces(self, first: int, remote: Sequence[int], remote_num_blocks: int) -> list[Piece]:
        runs = runs_of(zip(self._blocks[first:], remote, strict=False))
        pieces: list[Piece] = []
        for layer in self._layers:
            memory = self._memory[layer]
            nbytes = remote_num_blocks * memory.planes * memory.block_bytes
            pieces += remote_pieces(memory, layer * nbytes, nbytes, runs)
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
        self._sizer = sizer
        self._lease_s = lease_s
        self._clock = clock
        self._sender = KVSender(transport, _Memory(layers), sizer, clock)
        self._trace = None if trace is None else _new_trace(trace)
        self._lock = threading.RLock()  # what has nothing under way ends where it is asked
        self._transfers: dict[str, _Transfer] = {}
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        self._sent: set[str] = set()
        self._news = threading.Event()
        self._last_link = ""

    # ------------------------------------------------------------------ the engine's thread

    def begin(self, transfer_id: str, request_id: str, prompt: str) -> None:
        """A prompt is about to be computed. Idempotent."""
        with self._lock:
            transfer = self._of(transfer_id)
            transfer.request_id, transfer.prompt = request_id, prompt
            self._check(transfer_id, transfer)

    def push(self, transfer_id: str, layers: range, chunk: Chunk, *, last: bool) -> None:
        """These layers of a chunk are computed; ``last``: with them, the chunk is."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.outcome is not None:
                return
            if last and chunk.last:
                transfer.out.computed_at = self._clock()
            work = _Work(layers, chunk, last)
            if transfer.target is None:
                transfer.waiting.append(work)
            elif transfer.out.error is not None:
                self._end(transfer_id, transfer, str(transfer.out.error))
            else:
                self._send(transfer_id, transfer, work)

    def finish(self, transfer_id: str, *, computed: bool) -> None:
        """The engine is through with the request; its blocks stay until :meth:`take_sent` names it if it was
        ``computed``, and are gone now if it was not."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return
            transfer.finished_at = self._clock()
            if not computed:
                transfer.request_id = ""
                self._end(transfer_id, transfer, "the prompt was not computed to its end")
            elif transfer.outcome is not None:
                self._drop(transfer_id, transfer)
            elif transfer_id in self._unwanted:
                self._end(transfer_id, transfer, "it is not wanted")

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
            waiting, transfer.waiting = transfer.waiting, []
            for work in waiting:
                self._send(notice.transfer_id, transfer, work)
        asked_at = self._clock()
        while not transfer.done.wait(_LOOK_S):
            late = transfer.request_id == "" and self._clock() - asked_at > self._lease_s
            if late or has_left():
                self._give_up(notice.transfer_id)
        return transfer.outcome or ""

    def _give_up(self, transfer_id: str) -> None:
        with self._lock:
            self._unwanted[transfer_id] = None
            if len(self._unwanted) > _MAX_UNWANTED:
                self._unwanted.popitem(last=False)
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

    def _send(self, transfer_id: str, transfer: _Transfer, work: _Work) -> None:
        """Have it written; hold the lock."""
        target, out = transfer.target, transfer.out
        assert target is not None
        last_block = target.first_block + len(target.block_ids)
        numbers = range(work.chunk.first_block, work.chunk.first_block + len(work.chunk.blocks))
        pairs = [
            (block, target.block_ids[number - target.first_block])
            for number, block in zip(numbers, work.chunk.blocks, strict=True)
            if target.first_block <= number < last_block
        ]
        if pairs:
            self._last_link = target.region.name
            self._sender.push(work.layers, [Part(out, *map(list, zip(*pairs, strict=True)))])
        if work.last and work.chunk.last:
            self._sender.fence(out, lambda out: self._written(transfer_id, transfer))

    def _written(self, transfer_id: str, transfer: _Transfer) -> None:
        with self._lock:
            if transfer.outcome is None:
                self._record(transfer_id, transfer.out)
                self._end(transfer_id, transfer, str(transfer.out.error or ""))

    def group_size(self, num_tokens: int, layer_bytes: float) -> int:
        """Layers to send together in a step, for the link that was used last."""
        return self._sizer.group_size(self._last_link, num_tokens, layer_bytes)

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """A prefill step took ``seconds``."""
        self._sizer.observe_compute(num_tokens, seconds)

    def _record(self, transfer_id: str, out: OutgoingTransfer) -> None:
        if self._trace is None:
            return
        record = {
            "transfer_id": transfer_id,
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
            logger.warning("the record of transfer %s cannot be written: %s", transfer_id, error)

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
