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
from torch import Tensor

from device.base import Device
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions, decode_graph_sizes
from epd_serve.errors import ServeError, Unavailable
from epd_serve.media import MediaLimits
from epd_serve.metrics.trace import TraceWriter
from epd_serve.models.family import Family, load_family
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import eos_token_ids, media_fingerprint
from epd_serve.models.tower import Tower
from epd_serve.protocol import wire
from epd_serve.request import Sequence
from epd_serve.sched.encode import EncodeGate
from epd_serve.sched.language import ScheduleOutput
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender
from epd_serve.worker.batching import Batching, measurements
from epd_serve.worker.calls import StageCalls
from epd_serve.worker.commands import CreateCache
from epd_serve.worker.data_plane import start_feature_store, start_transport
from epd_serve.worker.decode import DecodeService
from epd_serve.worker.dual_stream import DualStream
from epd_serve.worker.encode import EncodeService
from epd_serve.worker.engine import Engine
from epd_serve.worker.events import Listeners
from epd_serve.worker.feature_form import FeatureForm
from epd_serve.worker.feature_inbox import FeatureInbox
from epd_serve.worker.feature_supply import FeatureSupply
from epd_serve.worker.followers import Followers
from epd_serve.worker.http import JSON, Reply
from epd_serve.worker.kv_delivery import Delivery, PullDelivery, Pulls, PushDelivery
from epd_serve.worker.kv_memory import KVMemory, block_nbytes
from epd_serve.worker.metrics import CONTENT_TYPE, InstanceMetrics
from epd_serve.worker.peers import Peers
from epd_serve.worker.prefill import PrefillService
from epd_serve.worker.prompt import PromptProcessor
from epd_serve.worker.request_processor import RequestProcessor
from epd_serve.worker.runner import LanguageRunner
from epd_serve.worker.sizing import check_dtype, num_kv_blocks, resolve_dtype
from epd_serve.worker.step import StepExecutor

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.25
_ORPHAN_S = 10.0
_ASK_AGAIN_S = 0.01
_MAX_MEDIA_THREADS = 8
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
        self._streams = DualStream(options, self._device)
        self._followers: Followers | None = None
        self._listeners = Listeners()
        self._tasks: set[asyncio.Task[None]] = set()
        self.trace = TraceWriter(options.trace, options.name) if options.trace else None
        self.metrics = InstanceMetrics(self.trace)
        self.pulls = Pulls()

    async def start(self) -> None:
        """Load what the role needs. Raises ValueError for a model or device that cannot serve it."""
        options = self.options
        self._loop = asyncio.get_running_loop()
        self._family: Family = await asyncio.to_thread(load_family, self._path)
        self._dtype = resolve_dtype(options.dtype, self._family.config)
        check_dtype(self._dtype, self._device)
        self._dtype_name = str(self._dtype).removeprefix("torch.")
        self._fingerprint = await asyncio.to_thread(media_fingerprint, self._path, self._dtype_name)
        self._transport = await asyncio.to_thread(start_transport, options, self._device.type)
        self._peers = Peers()
        self._language: LanguageModel | None = None
        self._engine: Engine | None = None
        self._inbox: FeatureInbox | None = None
        self._supply: FeatureSupply | None = None
        self._sender: KVSender | None = None
        self._prefill: PrefillService | None = None
        self._decode: DecodeService | None = None
        self._max_model_len = (
            options.max_model_len or self._family.config.get_text_config().max_position_embeddings
        )
        self._batching = Batching(options, measurements(options, self._device, self._fingerprint))
        self._gate = EncodeGate(lambda: self._engine is not None and self._engine.is_prefilling, time.monotonic)
        self._store = await asyncio.to_thread(
            start_feature_store, options, self._transport, self._device.type, self.metrics.store_did
        )
        self._processor = RequestProcessor(
            min(options.threads or max(1, len(os.sched_getaffinity(0)) // 2), _MAX_MEDIA_THREADS),
            queue_timeout_s=options.queue_timeout_s,
            observe=self.metrics.prepared,
        )
        self._encode = EncodeService(
            partial(Tower, self._path, self._dtype, self._device, self._streams.tower.between_layers),
            self._family,
            self._store,
            self._peers,
            image_budget_pixels=options.image_budget_pixels,
            limits=_MEDIA_LIMITS,
            processor=self._processor,
            on_delivered=self.metrics.timeline.encoded,
            on_batch=self.metrics.encoded_batch,
            url=self.url,
            deliver_here=self._deliver_here if options.role.has_language_model else None,
            stream=self._streams.tower,
            may_start=self._may_encode,
        )
        self._streams.language.on_failure = self._encode.reconsider
        if options.role.encodes:
            await self._encode.warm_up(lambda tower: self._batching.find_image_budget(tower, self._family))
        if options.role.has_language_model:
            await asyncio.to_thread(self._load_language_model)
            self._start_language_stages()
        self._spawn(asyncio.create_task(self._housekeep()))
        self.ready = True

    def _load_language_model(self) -> None:
        """Weights, cache and graphs, on all ranks."""
        options, group = self.options, None
        if len(options.devices) > 1:
            self._followers = Followers(options, self._dtype)
            group = self._followers.join(self._device)
        language = LanguageModel(self._path, self._dtype, self._device, group)
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=options.tokens_per_block,
            dtype=self._dtype_name,
            model=self._fingerprint,
        )
        free_bytes = self._device.headroom()
        if self._followers is not None:
            free_bytes = min(free_bytes, self._followers.wait_joined())
        self._memory = memory = KVMemory(
            layout,
            num_kv_blocks(options, layout, self._device.type, free_bytes),
            self._device,
            self._transport,
            heads=language.kv_heads if self._followers else None,
            followers=self._followers,
        )
        # a sequence that is alone must be able to reach its end
        self._max_model_len = min(
            self._max_model_len, language.max_model_len, (memory.num_blocks - 1) * options.tokens_per_block
        )
        create = CreateCache(
            layout=layout,
            num_blocks=memory.num_blocks,
            slab=memory.region,
            num_position_axes=self._family.num_position_axes,
            graph_sizes=decode_graph_sizes(options.max_num_seqs) if options.role.decodes else [],
            max_model_len=self._max_model_len,
        )
        if self._followers is not None:
            self._followers.send(create)
        executor = StepExecutor.for_cache(language, self._device, memory.tensor, create)
        self._language = language
        self._eos = eos_token_ids(self._path, self._family.config)
        self._runner = LanguageRunner(
            executor,
            self._device.ops,
            block_size=options.tokens_per_block,
            num_position_axes=self._family.num_position_axes,
            eos_token_ids=self._eos,
            followers=self._followers,
        )
        self._batching.find_budget(
            self._runner,
            num_blocks=memory.num_blocks,
            num_position_axes=self._family.num_position_axes,
            max_model_len=self._max_model_len,
        )

    def _start_language_stages(self) -> None:
        assert self._language is not None
        options, language, memory = self.options, self._language, self._memory
        layout = memory.layout
        self._inbox = FeatureInbox(
            options.feature_cache_bytes,
            self._store.fetch,
            lambda: engine.wake(),
            form=FeatureForm(
                dtype=self._dtype_name, width=language.feature_width, num_tokens=self._family.num_image_tokens
            ),
            orphan_s=_ORPHAN_S,
            clock=time.monotonic,
        )
        self._supply = FeatureSupply(
            self._inbox,
            self._loop,
            options.feature_prefetch,
            clock=time.monotonic,
            wake=lambda: engine.wake(),
            observe=self.metrics.feature_used,
        )
        sizer = GroupSizer(num_layers=language.num_layers, fixed=options.kv_group_layers)
        sender = KVSender(self._transport, memory, sizer, time.monotonic, self.metrics.kv_written)
        self._sender = sender
        pool = BlockPool(memory.num_blocks, options.tokens_per_block)
        self._engine = engine = Engine(
            self._runner,
            pool,
            self._batching.budget,
            num_layers=language.num_layers,
            eos_token_ids=self._eos,
            feature_of=self._supply.take,
            has_feature=self._supply.has,
            on_starved=self._supply.starved,
            memory=memory,
            block_nbytes=block_nbytes(layout),
            record_event=lambda: self._device.record_event().synchronize,
            sender=sender,
            kv_mode=options.kv_mode,
            emit=lambda events: self._call_on_loop(self._listeners.dispatch, events),
            on_free=lambda: self._call_on_loop(self._blocks_freed),
            around_step=self._streams.language.step,
            on_step=self._stepped,
            order=self._batching.order(pool),
        )
        prompts = PromptProcessor(
            self._path,
            self._family,
            language.inner,
            max_model_len=self._max_model_len,
            block_size=options.tokens_per_block,
        )
        self._prefill = PrefillService(
            engine,
            prompts,
            self._inbox,
            self._deliver,
            layout,
            processor=self._processor,
            timeline=self.metrics.timeline,
            feature_timeout_s=options.feature_timeout_s,
            lease_s=options.lease_s,
            listen=self._listeners.listen,
            spawn=self._spawn,
            delivered=self.metrics.kv_delivered,
        )
        self._decode = DecodeService(
            engine,
            memory,
            prompts.tokenizer,
            layout,
            transport=self._transport,
            peers=self._peers,
            queue_timeout_s=options.queue_timeout_s,
            orphan_s=_ORPHAN_S,
            listen=self._listeners.listen,
            on_read=self.metrics.kv_read,
            timeline=self.metrics.timeline,
        )
        engine.start()

    def _deliver(self, reserve: wire.ReserveRequest, sequence: Sequence, decode_url: str) -> Delivery:
        assert self._engine is not None and self._sender is not None
        if self.options.kv_mode == "pull":
            return PullDelivery(
                reserve, decode_url, sequence, self._memory, self._peers, self.pulls, source_url=self.url
            )
        return PushDelivery(
            reserve, decode_url, self._sender, self._peers, abort=self._engine.abort, spawn=self._spawn
        )

    async def close(self) -> None:
        """Stop threads and give back memory."""
        self.ready = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._processor.close()
        await self._encode.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)
        await self._peers.close()
        await asyncio.to_thread(self._store.close)
        self._transport.close()
        self._streams.board.close()
        if self.trace is not None:
            self.trace.close()

    # ------------------------------------------------------------------ calls

    def routes(self) -> list[tuple[str, str, Callable[[bytes], Any]]]:
        """(method, path, handler) of the control server; see :mod:`epd_serve.protocol.wire`."""
        return [
            ("GET", "/health", self._health),
            ("GET", "/info", self._info),
            ("GET", "/integrity", self._integrity),
            ("GET", "/metrics", self._render_metrics),
            *StageCalls(self).routes(),
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
            device=self.options.device,
            dtype=self._dtype_name,
            pid=os.getpid(),
            ready=self.ready,
            load=self._load(),
            parameters={
                "tower": self._encode.num_parameters,
                "language_model": self._language.num_parameters if self._language else 0,
            },
            share=self._streams.share,
            budgets=self._batching.summary(),
        )
        return Reply(headers=(JSON,), body=wire.to_json(info))

    def _load(self) -> wire.Load:
        load = self._engine.load() if self._engine else wire.Load()
        return msgspec.structs.replace(load, num_waiting_encodes=self._encode.num_waiting)

    async def _integrity(self, body: bytes) -> Reply:
        """Check every cache's books; the answer lists what is in use, all zero on an idle instance."""
        self._check_ready()
        in_use = {
            "features_held": self._store.num_owners,
            "encodes": self._encode.num_waiting,
            "preparations": self._processor.num_waiting,
        }
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
                "timeline": self.metrics.timeline.num_requests,
            }
        return Reply(headers=(JSON,), body=msgspec.json.encode(in_use))

    async def _render_metrics(self, body: bytes) -> Reply:
        self._check_ready()
        links = self._sender.sizer.known_links() if self._sender else {}
        text = self.metrics.render(self._load(), (self._store.num_owners, self._store.num_bytes), links)
        return Reply(headers=((b"content-type", CONTENT_TYPE.encode()),), body=text)

    def _check_ready(self) -> None:
        if not self.ready:
            raise Unavailable("the instance is loading its model")

    def encodes(self) -> EncodeService:
        """The encode stage, which every role has for the worst case. Raises Unavailable while it is loading."""
        self._check_ready()
        return self._encode

    def prefills(self) -> PrefillService:
        """The prefill stage. Raises Unavailable where the role has none, or while it is loading."""
        self._check_ready()
        if self._prefill is None or not self.options.role.prefills:
            raise Unavailable(f"instance {self.options.name} has role {self.options.role} and does not prefill")
        return self._prefill

    def decodes(self) -> DecodeService:
        """The decode stage, likewise."""
        self._check_ready()
        if self._decode is None or not self.options.role.decodes:
            raise Unavailable(f"instance {self.options.name} has role {self.options.role} and does not decode")
        return self._decode

    def features(self) -> FeatureSupply:
        """What the prefill stage has features from, likewise."""
        self.prefills()
        assert self._supply is not None
        return self._supply

    # ------------------------------------------------------------------ inside

    async def _deliver_here(self, request_id: str, item: wire.MediaRef, feature: Tensor) -> None:
        assert self._inbox is not None
        await self._inbox.take(request_id, item, feature)

    def _stepped(self, output: ScheduleOutput, seconds: float) -> None:
        self.metrics.stepped(output, seconds)
        assert self._engine is not None
        self._streams.language.stepped(output, seconds, self._engine.load().num_running)
        self._batching.stepped(output, seconds)
        self._encode.reconsider()

    def _may_encode(self) -> bool:
        if self.options.batching_encodes == "concurrent" or self._gate.may_start():
            return True
        self._loop.call_later(_ASK_AGAIN_S, self._encode.reconsider)
        return False

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
