"""P's side of a KV hand-over: blocks go out in groups of layers while the next layers are computed."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from epd_serve.protocol.engine_notices import AnyNotice, KVUnwanted, KVWanted
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.transport import TransferError, Transport
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
    prompt: str = ""
    target: KVWanted | None = None
    waiting: list[_Work] = field(default_factory=list)
    outcome: str | None = None
    request_id: str = ""
    finished_at: float | None = None
    computed_at: float = 0.0
    write_s: float = 0.0
    nbytes: int = 0
    num_writes: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class KVSender:
    """Transfers by id. ``push`` and ``finish`` come from the engine, ``handle`` from D's connections, and a
    thread for each D writes: in order, and no D waits for another.

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
        self._transport = transport
        self._layers = layers
        self._sizer = sizer
        self._lease_s = lease_s
        self._clock = clock
        self._trace = None if trace is None else _new_trace(trace)
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        self._sent: set[str] = set()
        self._news = threading.Event()
        self._lanes: Lanes[tuple[str, _Transfer, _Work]] = Lanes("kv-sender", self._handle_work)
        self._last_link = ""

    # ------------------------------------------------------------------ the engine's thread

    def begin(self, transfer_id: str, request_id: str, prompt: str) -> None:
        """A prompt is about to be computed. Idempotent."""
        with self._lock:
            transfer = self._transfers.setdefault(transfer_id, _Transfer())
            transfer.request_id, transfer.prompt = request_id, prompt
            self._check(transfer_id, transfer)

    def push(self, transfer_id: str, layers: range, chunk: Chunk, *, last: bool) -> None:
        """These layers of a chunk are computed; ``last``: with them, the chunk is."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.outcome is not None:
                return
            if last and chunk.last:
                transfer.computed_at = self._clock()
            work = _Work(layers, chunk, last)
            if transfer.target is None:
                transfer.waiting.append(work)
            else:
                self._lanes.put(_link(transfer.target), (transfer_id, transfer, work))

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
            transfer = self._transfers.setdefault(notice.transfer_id, _Transfer())
            transfer.target = notice
            self._check(notice.transfer_id, transfer)
            waiting, transfer.waiting = transfer.waiting, []
            for work in waiting:
                self._lanes.put(_link(notice), (notice.transfer_id, transfer, work))
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
        transfer.waiting = []
        transfer.done.set()
        if transfer.finished_at is not None or not transfer.request_id:
            self._drop(transfer_id, transfer)

    def _drop(self, transfer_id: str, transfer: _Transfer) -> None:
        if self._transfers.pop(transfer_id, None) is not None and transfer.request_id:
            self._sent.add(transfer.request_id)
            self._news.set()

    # ------------------------------------------------------------------ the writing threads

    def _handle_work(self, item: tuple[str, _Transfer, _Work]) -> None:
        transfer_id, transfer, work = item
        if transfer.outcome is not None:
            return
        try:
            self._write(transfer_id, transfer, work)
        except Exception as error:  # one request's must not end the thread that all of a D wait for
            if not isinstance(error, TransferError):
                logger.exception("KV of transfer %s cannot be written", transfer_id)
            with self._lock:
                self._end(transfer_id, transfer, str(error) or type(error).__name__)
            return
        if work.last and work.chunk.last:
            with self._lock:
                self._record(transfer_id, transfer)
                self._end(transfer_id, transfer, "")

    def _write(self, transfer_id: str, transfer: _Transfer, work: _Work) -> None:
        target = transfer.target
        assert target is not None
        last_block = target.first_block + len(target.block_ids)
        pairs = [
            (block, target.block_ids[index - target.first_block])
            for index, block in enumerate(work.chunk.blocks, work.chunk.first_block)
            if target.first_block <= index < last_block
        ]
        runs = runs_of(pairs)
        if not runs:
            return
        region, link = target.region, _link(target)
        layer_bytes = region.nbytes // target.num_layers
        pieces = []
        for layer in work.layers:
            pieces += remote_pieces(self._layers[layer], layer * layer_bytes, layer_bytes, runs)
        nbytes = sum(data.nbytes for _, data in pieces)
        started = self._clock()
        try:
            self._transport.write(region, pieces, [transfer_id])
        except TransferError:
            self._sizer.forget(link)
            raise
        seconds = self._clock() - started
        self._sizer.observe_transfer(link, nbytes, seconds)
        self._last_link = link
        transfer.write_s += seconds
        transfer.nbytes += nbytes
        transfer.num_writes += 1

    def group_size(self, num_tokens: int, layer_bytes: float) -> int:
        """Layers to send together in a step, for the link that was used last."""
        return self._sizer.group_size(self._last_link, num_tokens, layer_bytes)

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """A prefill step took ``seconds``."""
        self._sizer.observe_compute(num_tokens, seconds)

    def _record(self, transfer_id: str, transfer: _Transfer) -> None:
        if self._trace is None:
            return
        exposed_s = max(0.0, self._clock() - transfer.computed_at)
        record = {
            "transfer_id": transfer_id,
            "bytes": transfer.nbytes,
            "writes": transfer.num_writes,
            "transfer_s": round(transfer.write_s, 6),
            "exposed_s": round(exposed_s, 6),
            "overlap": round(1 - min(1.0, exposed_s / transfer.write_s), 4) if transfer.write_s else 0.0,
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


def _link(target: KVWanted) -> str:
    return f"{target.region.host}:{target.region.port}"


def _new_trace(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"vllm-kv-{time.time_ns()}.jsonl"
    file.touch()
    return file


Work = TypeVar("Work")


class Lanes(Generic[Work]):
    """A thread for each lane that has work, or had some ``idle_s`` ago.

    ``handle`` does a piece of work and must not raise.
    """

    def __init__(self, name: str, handle: Callable[[Work], None], idle_s: float = 10.0) -> None:
        self._name = name
        self._handle = handle
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[Work]] = {}

    def put(self, lane: str, work: Work) -> None:
        """It is done after all that was put into the same lane before. Returns at once."""
        with self._lock:
            waiting = self._queues.get(lane)
            if waiting is None:
                waiting = self._queues[lane] = queue.SimpleQueue()
                thread = threading.Thread(target=self._run, args=(lane, waiting), name=self._name, daemon=True)
                thread.start()
            waiting.put(work)

    @property
    def num_threads(self) -> int:
        with self._lock:
            return len(self._queues)

    def _run(self, lane: str, waiting: queue.SimpleQueue[Work]) -> None:
        while True:
            try:
                work = waiting.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if waiting.empty():
                        del self._queues[lane]
                        return
            else:
                self._handle(work)
