"""D's side of a KV hand-over: it asks P to write into its blocks and waits without holding anything up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from epd_serve.protocol.engine_notices import KVUnwanted, KVWanted
from epd_serve.protocol.wire import Region
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.vllm_plugin.kv_layout import LayerMemory
from epd_serve.vllm_plugin.notices import Conversation, NoticeRefused

logger = logging.getLogger("vllm.epd_serve")

_MAX_RECEIVES = 256
_LOOK_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Receive:
    """A request whose prompt P computes. ``address`` is P's."""

    request_id: str
    transfer_id: str
    address: str
    prompt: str
    first_block: int
    blocks: list[int]


@dataclass(slots=True)
class Received:
    """Requests that are over: their blocks are written, or (``failed``, also among ``done``) they are not."""

    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class KVReceiver:
    """One thread for each request that waits for its KV.

    Args:
        timeout_s: how long P may take, its queue included.
    """

    def __init__(
        self, transport: EmbeddedTransport, layers: Sequence[LayerMemory], timeout_s: float = 300.0
    ) -> None:
        self._transport = transport
        self._layers = layers
        self._region: Region = transport.offer("kv", [layer.buffer for layer in layers])
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: dict[str, Conversation] = {}
        self._ended = Received()
        self._news = threading.Event()
        self._threads = ThreadPoolExecutor(_MAX_RECEIVES, thread_name_prefix="kv-receive")

    def receive(self, wanted: Receive) -> None:
        conversation = Conversation(wanted.address)
        with self._lock:
            self._open[wanted.request_id] = conversation
        self._transport.gate.open(wanted.transfer_id)
        self._threads.submit(self._run, wanted, conversation)

    def decline(self, address: str, transfer_id: str) -> None:
        """The request is over before it asked for anything."""

        def tell() -> None:
            try:
                Conversation(address).ask(KVUnwanted(transfer_id=transfer_id), self._timeout_s)
            except (OSError, NoticeRefused) as error:
                logger.info("%s does not hear that transfer %s is not wanted: %s", address, transfer_id, error)

        self._threads.submit(tell)

    def cancel(self, request_id: str) -> None:
        """The request is over; it is still named by :meth:`take_ended` once nothing writes to its blocks."""
        with self._lock:
            conversation = self._open.get(request_id)
        if conversation is not None:
            conversation.close()

    def take_ended(self) -> Received:
        """Return the transfers that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, Received()
            return ended

    def wait(self, timeout_s: float) -> None:
        """Until a request is over since the last call, while one is open; at most ``timeout_s``."""
        if self.num_open and self._news.wait(timeout_s):
            self._news.clear()

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def _run(self, wanted: Receive, conversation: Conversation) -> None:
        layer = self._layers[0]
        notice = KVWanted(
            transfer_id=wanted.transfer_id,
            prompt=wanted.prompt,
            first_block=wanted.first_block,
            block_ids=wanted.blocks,
            region=self._region,
            num_layers=len(self._layers),
            planes=layer.planes,
            block_bytes=layer.block_bytes,
        )
        failed = True
        try:
            conversation.ask(notice, self._timeout_s)
            failed = False
        except (OSError, NoticeRefused) as error:
            logger.warning("KV of %s does not come from %s: %s", wanted.request_id, wanted.address, error)
        finally:
            gate = self._transport.gate
            gate.shut(wanted.transfer_id)
            while gate.is_inside(wanted.transfer_id):  # its blocks are nobody else's before
                time.sleep(_LOOK_S)
            with self._lock:
                del self._open[wanted.request_id]
                self._ended.done.add(wanted.request_id)
                if failed:
                    self._ended.failed.add(wanted.request_id)
            self._news.set()
