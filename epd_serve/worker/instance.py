"""One instance: the stages of its role, put together, behind a control server."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from device.base import Device
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.errors import ServeError, Unavailable
from epd_serve.media import MediaLimits
from epd_serve.models.family import Family, load_family
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import eos_token_ids, media_fingerprint
from epd_serve.models.tower import Tower
from epd_serve.protocol import wire
from epd_serve.sched.language import Budget
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender
from epd_serve.worker.commands import CreateCache
from epd_serve.worker.decode import DecodeService
from epd_serve.worker.encode import EncodeService
from epd_serve.worker.engine import Engine
from epd_serve.worker.events import EngineEvent, FailureEvent
from epd_serve.worker.feature_inbox import FeatureInbox
from epd_serve.worker.followers import Followers
from epd_serve.worker.http import JSON, Reply
from epd_serve.worker.kv_memory import KVMemory, block_nbytes
from epd_serve.worker.peers import Peers
from epd_serve.worker.prefill import PrefillService
from epd_serve.worker.prompt import PromptProcessor
from epd_serve.worker.runner import LanguageRunner
from epd_serve.worker.step import StepExecutor

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.25
_DEFAULT_KV_BYTES = 1 << 28
#: Of an accelerator's memory that is free once the weights are loaded; activations need the rest.
_FREE_MEMORY_FOR_KV = 0.8
_MIN_BLOCKS = 64
_ORPHAN_S = 10.0
#: The gateway applies the operator's limits; an instance only guards itself.
_MEDIA_LIMITS = MediaLimits(max_pixels=1 << 28, max_bytes=1 << 30)


class Instance:
    """Stages, caches and threads of one process. Build it, ``await start()``, then serve :meth:`routes`."""

    def __init__(self, options: InstanceOptions) -> None:
        self.options = options
        self.url = f"http://{options.host}:{options.port}"
        self.ready = False
        self._path = Path(options.model)
        self._device: Device = get_device(options.devices[0])
        self._followers: Followers | None = None
        self._listeners: dict[str, Callable[[EngineEvent], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load what the role needs. Raises ValueError for a model or device that cannot serve it."""
        options = self.options
        self._loop = asyncio.get_running_loop()
        self._family: Family = await asyncio.to_thread(load_family, self._path)
        self._dtype = _resolve_dtype(options.dtype, self._family.config)
        self._dtype_name = str(self._dtype).removeprefix("torch.")
        self._fingerprint = await asyncio.to_thread(media_fingerprint, self._path, self._dtype_name)
        self._transport = EmbeddedTransport(options.host, options.kv_transport, options.lease_s / 4)
        self._peers = Peers()
        self._language: LanguageModel | None = None
        self._engine: Engine | None = None
        self._inbox: FeatureInbox | None = None
        self._prefill: PrefillService | None = None
        self._decode: DecodeService | None = None
        self._max_model_len = (
            options.max_model_len or self._family.config.get_text_config().max_position_embeddings
        )
        self._store = EmbeddedFeatureStore(self._transport, options.feature_store_bytes)
        self._encode = EncodeService(
            partial(Tower, self._path, self._dtype, self._device),
            self._family,
            self._store,
            self._peers,
            image_budget_pixels=options.image_budget_pixels,
            limits=_MEDIA_LIMITS,
        )
        if options.role.encodes:
            await self._encode.warm_up()
        if options.role.has_language_model:
            await asyncio.to_thread(self._load_language_model)
            self._start_language_stages()
        self._spawn(asyncio.create_task(self._housekeep()))
        self.ready = True

    def _load_language_model(self) -> None:
        """Weights, cache and graphs, on all ranks."""
        options, group = self.options, None
        if len(options.devices) > 1:
            self._followers = Followers(options.name, self._path, self._dtype, options.devices, options.threads)
            group = self._followers.join(self._device)
        language = LanguageModel(self._path, self._dtype, self._device, group)
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=options.block_size,
            dtype=self._dtype_name,
            model=self._fingerprint,
        )
        self._memory = memory = KVMemory(
            layout,
            self._num_blocks(layout),
            self._device,
            self._transport,
            heads=language.kv_heads if self._followers else None,
            followers=self._followers,
        )
        # a request takes all blocks that it may need at once, so the pool bounds the context too
        self._max_model_len = min(
            self._max_model_len, language.max_model_len, (memory.num_blocks - 1) * options.block_size
        )
        sizes = {
            "num_position_axes": self._family.num_position_axes,
            "max_num_seqs": options.max_num_seqs,
            "max_model_len": self._max_model_len,
        }
        if self._followers is not None:
            self._followers.send(
                CreateCache(layout=layout, num_blocks=memory.num_blocks, slab=memory.region, **sizes)
            )
        self._executor = StepExecutor(language, self._device, memory.tensor, **sizes)
        self._language = language

    def _start_language_stages(self) -> None:
        assert self._language is not None
        options, language, memory = self.options, self._language, self._memory
        layout = memory.layout
        eos = eos_token_ids(self._path, self._family.config)
        runner = LanguageRunner(
            self._executor,
            self._device.ops,
            block_size=options.block_size,
            num_position_axes=self._family.num_position_axes,
            eos_token_ids=eos,
            followers=self._followers,
        )
        self._inbox = FeatureInbox(
            options.feature_cache_bytes,
            self._transport,
            lambda: engine.wake(),
            orphan_s=_ORPHAN_S,
            clock=time.monotonic,
        )
        sizer = GroupSizer(num_layers=language.num_layers, fixed=options.kv_group_layers)
        sender = KVSender(self._transport, memory, sizer, time.monotonic)
        self._engine = engine = Engine(
            runner,
            BlockPool(memory.num_blocks, options.block_size),
            Budget(max_num_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs),
            num_layers=language.num_layers,
            eos_token_ids=eos,
            feature_of=self._inbox.get,
            copy_block=memory.copy_block,
            block_nbytes=block_nbytes(layout),
            record_event=lambda: self._device.record_event().synchronize,
            sender=sender,
            emit=lambda events: self._call_on_loop(self._dispatch, events),
            on_free=lambda: self._call_on_loop(self._blocks_freed),
        )
        processor = PromptProcessor(
            self._path,
            self._family,
            language.inner,
            max_model_len=self._max_model_len,
            block_size=options.block_size,
            num_blocks=memory.num_blocks - 1,
        )
        self._prefill = PrefillService(
            engine,
            processor,
            self._inbox,
            sender,
            self._peers,
            layout,
            feature_timeout_s=options.feature_timeout_s,
            lease_s=options.lease_s,
            listen=self._listen,
            spawn=self._spawn,
        )
        self._decode = DecodeService(
            engine, memory, processor.tokenizer, layout, orphan_s=_ORPHAN_S, listen=self._listen
        )
        engine.start()

    def _num_blocks(self, layout: wire.KVLayout) -> int:
        options = self.options
        free_bytes = self._device.memory()[1]
        if self._followers is not None:
            free_bytes = min(free_bytes, self._followers.wait_joined())
        if options.num_blocks is not None:
            return options.num_blocks
        if options.kv_cache_bytes is not None:
            size = options.kv_cache_bytes
        elif self._device.type == "cpu":
            size = _DEFAULT_KV_BYTES
        else:
            size = int(free_bytes * _FREE_MEMORY_FOR_KV) * len(options.devices)
        return max(size // block_nbytes(layout), _MIN_BLOCKS)

    async def close(self) -> None:
        """Stop threads and give back memory."""
        self.ready = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._encode.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)
        await self._peers.close()
        self._transport.close()

    # ------------------------------------------------------------------ calls

    def routes(self) -> list[tuple[str, str, Callable[[bytes], Any]]]:
        """(method, path, handler) of the control server; see :mod:`epd_serve.protocol.wire`."""
        return [
            ("GET", "/health", self._health),
            ("GET", "/info", self._info),
            ("GET", "/integrity", self._integrity),
            ("POST", "/stage/encode", self._stage_encode),
            ("POST", "/stage/prefill", self._stage_prefill),
            ("POST", "/stage/decode", self._stage_decode),
            ("POST", "/feature/event", self._feature_event),
            ("POST", "/kv/reserve", self._kv_reserve),
            ("POST", "/kv/renew", self._kv_renew),
            ("POST", "/kv/complete", self._kv_complete),
            ("POST", "/kv/cancel", self._kv_cancel),
        ]

    async def _health(self, body: bytes) -> Reply:
        if not self.ready:
            raise Unavailable("the instance is loading its model")
        return Reply(headers=(JSON,), body=b'{"status":"ok"}')

    async def _info(self, body: bytes) -> Reply:
        self._check_ready()
        info = wire.InstanceInfo(
            name=self.options.name,
            role=str(self.options.role),
            url=self.url,
            model=self.options.served_model_name,
            model_path=str(self._path),
            max_model_len=self._max_model_len,
            media_fingerprint=self._fingerprint,
            device=",".join(self.options.devices),
            dtype=self._dtype_name,
            pid=os.getpid(),
            ready=self.ready,
            load=self._load(),
            parameters={
                "tower": self._encode.num_parameters,
                "language_model": self._language.num_parameters if self._language else 0,
            },
        )
        return Reply(headers=(JSON,), body=wire.to_json(info))

    def _load(self) -> wire.Load:
        load = self._engine.load() if self._engine else wire.Load()
        return msgspec.structs.replace(load, num_waiting_encodes=self._encode.num_waiting)

    async def _integrity(self, body: bytes) -> Reply:
        """Check every cache's books; the answer lists what is in use, all zero on an idle instance."""
        self._check_ready()
        in_use = {"features_held": self._store.num_owners, "encodes": self._encode.num_waiting}
        try:
            self._store.check_integrity()
            if self._engine and self._inbox and self._decode:
                self._engine.check_integrity()
                self._inbox.check_integrity()
                self._decode.check_integrity()
        except AssertionError as error:
            raise ServeError(f"the books do not balance: {error}", code="integrity") from error
        if self._engine and self._inbox and self._decode:
            load = self._engine.load()
            in_use |= {
                "blocks": load.total_blocks - load.free_blocks,
                "sequences": load.num_running + load.num_waiting,
                "reservations": self._decode.num_reservations,
                "feature_owners": self._inbox.num_owners,
                "listeners": len(self._listeners),
            }
        return Reply(headers=(JSON,), body=msgspec.json.encode(in_use))

    async def _stage_encode(self, body: bytes) -> Reply:
        self._check_ready()
        reply = await self._encode.encode(wire.decode(body, wire.EncodeRequest))
        return Reply(body=wire.encode(reply))

    async def _stage_prefill(self, body: bytes) -> Reply:
        return await self._prefills().prefill(wire.decode(body, wire.PrefillRequest))

    async def _stage_decode(self, body: bytes) -> Reply:
        return await self._decodes().decode(wire.decode(body, wire.DecodeRequest))

    async def _feature_event(self, body: bytes) -> Reply:
        self._prefills()
        assert self._inbox is not None
        await self._inbox.receive(wire.decode(body, wire.FeatureEvent))
        return Reply(status=204)

    async def _kv_reserve(self, body: bytes) -> Reply:
        reply = await self._decodes().reserve(wire.decode(body, wire.ReserveRequest))
        return Reply(body=wire.encode(reply))

    async def _kv_renew(self, body: bytes) -> Reply:
        self._decodes().renew(wire.decode(body, wire.TransferRef))
        return Reply(status=204)

    async def _kv_complete(self, body: bytes) -> Reply:
        self._decodes().complete(wire.decode(body, wire.Handoff))
        return Reply(status=204)

    async def _kv_cancel(self, body: bytes) -> Reply:
        self._decodes().cancel(wire.decode(body, wire.TransferRef))
        return Reply(status=204)

    def _check_ready(self) -> None:
        if not self.ready:
            raise Unavailable("the instance is loading its model")

    def _prefills(self) -> PrefillService:
        self._check_ready()
        if self._prefill is None or not self.options.role.prefills:
            raise Unavailable(f"instance {self.options.name} has role {self.options.role} and does not prefill")
        return self._prefill

    def _decodes(self) -> DecodeService:
        self._check_ready()
        if self._decode is None or not self.options.role.decodes:
            raise Unavailable(f"instance {self.options.name} has role {self.options.role} and does not decode")
        return self._decode

    # ------------------------------------------------------------------ inside

    def _listen(self, request_id: str, feed: Callable[[EngineEvent], None] | None) -> None:
        if feed is None:
            self._listeners.pop(request_id, None)
        else:
            self._listeners[request_id] = feed

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            feed = self._listeners.get(event.request_id)
            if feed is None:
                continue
            try:
                feed(event)
            except Exception as error:  # an answer that cannot be written must not take the others along
                logger.exception("the answer of request %s failed", event.request_id)
                feed(FailureEvent(event.request_id, ServeError(f"the answer cannot be written: {error}")))

    def _blocks_freed(self) -> None:
        if self._decode is not None:
            self._decode.blocks_freed()

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if self._decode is not None and self._inbox is not None:
                try:
                    self._decode.expire()
                    self._inbox.expire()
                except Exception:  # without housekeeping the instance would leak from now on
                    logger.exception("housekeeping failed")


def _resolve_dtype(name: str, config: Any) -> torch.dtype:
    """``auto`` is what the checkpoint was saved in."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    declared = getattr(config, "dtype", None) or torch.float32
    return declared if isinstance(declared, torch.dtype) else getattr(torch, declared)
