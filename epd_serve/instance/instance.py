"""An instance: assembles the stages of its role and serves their control calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from device.base import BareDevice
from device.transport import TRANSPORTS
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.config.sections import MIN_SEGMENT_BYTES
from epd_serve.engine import pace
from epd_serve.engine.dual_stream import DualStream
from epd_serve.engine.engine import Engine, Outbox
from epd_serve.engine.pace import StepLimits
from epd_serve.engine.step_loop import KVPush, LayerGroups, StepLoop
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import DRAINING, InstanceFailed, Unavailable
from epd_serve.factories import as_it_is, factory
from epd_serve.instance.answer import Generation
from epd_serve.instance.calls import CleanUps, ControlCalls, Peers, Refusals, Reports
from epd_serve.instance.decode import Decoder
from epd_serve.instance.encode import Encoder
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.lifecycle import Lifecycle, SwitchState
from epd_serve.instance.loading.model import open_device, open_model
from epd_serve.instance.prefill import Prefiller
from epd_serve.instance.text.request_processor import RequestProcessor, num_media_threads
from epd_serve.protocol import instance_state
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import cluster_key
from epd_serve.rpc.server import Handler
from epd_serve.rpc.tls import tls_files
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore, FeatureStore, StoreObserver
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender
from epd_serve.transfer.mooncake.engine import MooncakeOptions, StoreClient
from epd_serve.transfer.mooncake.store import MooncakeFeatureStore
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.shared_memory import host_id
from epd_serve.transfer.transport import Transport
from epd_serve.types import Role

if TYPE_CHECKING:
    from epd_serve.instance.loading.model import Language

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.25
#: A read must end well before the lease of its target blocks.
_READS_PER_LEASE = 4


class Instance:
    """Stages, caches and threads of one process. Construct it, ``await start()``, then serve :meth:`handlers`.

    Attributes:
        is_accepting: whether it accepts new requests.
        encoder: encode stage; present in every role, as a last resort.
        weights: language model, if loaded; it outlives the roles that use it.
        loop: steps of the language model's engine; None in role E, as are the parts around it.
        prefiller, decoder: stages of the role; None if the role lacks them.
    """

    def __init__(self, options: InstanceOptions) -> None:
        self.url = url_of(options.advertise or options.host, options.port, tls=tls_files() is not None)
        self.ready = self.is_accepting = False
        self.weights: Language | None = None
        self.loop: StepLoop | None = None
        self.sender: KVSender | None = None
        self.receiver: FeatureReceiver | None = None
        self.prefiller: Prefiller | None = None
        self.decoder: Decoder | None = None
        self.device: BareDevice = open_device(options)
        self.options = options = options.on_memory(self.device.memory()[0])
        logger.info("%s of %s: %s", options.name, self.device.name, options.sizes)
        self.streams = DualStream(options, self.device)
        self.clean_ups = CleanUps()
        # the instance's embedded store holds features that Mooncake does not accept
        stores = tuple(dict.fromkeys(("embedded", options.feature_store)))
        self.telemetry = InstanceTelemetry(options.name, stores=stores, trace=options.trace)
        self.refusals = Refusals(options.name)
        self.lifecycle = Lifecycle(self, options.role)
        self.reports = Reports(self)

    async def start(self) -> None:
        """Load the parts that the role needs. Raises ValueError if the model or device does not support it."""
        options = self.options
        self.outbox = Outbox()
        self.model = await asyncio.to_thread(open_model, options, self.device)
        self.family = self.model.family
        self.check_role(options.role)
        transport = await asyncio.to_thread(start_transport, options, self.device)
        # Mooncake has its own links
        self.transport = transport if options.kv_transfer.transport == "mooncake" else self.model.linked(transport)
        self.peers = Peers()
        self.store = await self._new_store()
        self.processor = RequestProcessor(
            num_media_threads(options.threads),
            queue_timeout_s=options.queue_timeout_s,
            spans=self.telemetry.spans,
        )
        self.encoder = Encoder(
            self.model,
            self.peers,
            processor=self.processor,
            stream=self.streams.tower,
            device=self.device,
            telemetry=self.telemetry,
            url=self.url,
        )
        await self._build()
        self.clean_ups.start(self._housekeep())
        self.ready = True
        self.state_changed()

    async def _new_store(self) -> FeatureStore:
        options, transport, observe = self.options, self.transport, self.telemetry.metrics.store_did
        host = await asyncio.to_thread(
            start_feature_store, options, transport, self.device, observe, self.model.producer
        )
        return await asyncio.to_thread(self.model.feature_store, options, host, transport, observe)

    async def _build(self) -> None:
        """Build the stages of the role, reusing loaded parts; with ``resident: all``, load all weights."""
        options, role = self.options, self.options.role
        keeps_all = options.resident == "all"
        self.limits = StepLimits(options, self.model.measured)
        self.encoder.serve(self.store, options.image_budget_pixels)
        if self.family.token_ids and (role.encodes or keeps_all):
            await self.encoder.load_tower(self.limits if role.encodes else None)
            logger.info("tower loaded")
        if self.weights is None and (role.has_language_model or keeps_all):
            # set before the engine is built: if that fails, the next role reuses the weights
            self.weights = await asyncio.to_thread(self.model.language, self)
            logger.info("language model loaded")
        if self.weights is not None and role.has_language_model:
            await asyncio.to_thread(self._build_language, self.weights)
            self.encoder.consumer = self.receiver

    def _build_language(self, weights: Language) -> None:
        """Allocate KV memory, capture graphs, start the engine, and build the role's stages around it. Blocks.

        Raises ValueError if the options do not fit the model.
        """
        options, limits, telemetry = self.options, self.limits, self.telemetry
        with self.streams.language.loading():
            runner = weights.prepare(self)
            memory, layout = weights.memory, weights.memory.layout
            num_blocks = memory.num_blocks - layout.state_blocks
            limits.find_budget(
                weights.step_seconds(runner), num_blocks=num_blocks, max_model_len=weights.max_model_len
            )
        logger.info("KV memory allocated")
        group_layers = options.kv_transfer.group_layers
        fixed = None if group_layers == "auto" else group_layers
        sender = KVSender(memory, GroupSizer(num_layers=layout.num_layers, fixed=fixed), time.monotonic)
        pool = BlockPool(memory.num_blocks, options.tokens_per_block, state_blocks=layout.state_blocks)
        engine = Engine(
            pool,
            memory,
            limits.budget,
            self.outbox,
            eos_token_ids=weights.eos_token_ids,
            sender=sender,
            order=limits.order(pool),
        )
        receiver = factory("features", FeatureReceiver)(
            self.store,
            engine,
            telemetry.metrics,
            weights.feature_form,
            capacity_bytes=options.sizes.feature_cache_bytes,
        )
        layer_bytes = weights.block_nbytes // layout.num_layers
        loop = StepLoop(
            engine,
            runner,
            receiver,
            self.streams.language,
            telemetry,
            limits=limits,
            push=KVPush(sender, layout, layer_bytes, self.device, factory("layer groups", LayerGroups)),
            runs_ahead=self.device.type != "cpu",
        )
        loop.start(partial(weights.warm_up, runner, options.sizes.max_num_batched_tokens))
        logger.info("engine warmed up")
        self.loop, self.sender, self.receiver = loop, sender, receiver
        if options.role.prefills:
            self.prefiller = Prefiller(
                instance=self, weights=weights, engine=engine, sender=sender, receiver=receiver
            )
        if options.role.decodes:
            self.decoder = Decoder(
                engine=engine,
                memory=memory,
                tokenizer=weights.prompts.tokenizer,
                transport=self.transport,
                compiler=weights.compiler,
                telemetry=telemetry,
                queue_timeout_s=options.queue_timeout_s,
            )

    async def _close_language(self) -> None:
        """Stop the engine and drop everything around it except the weights."""
        closing = [self.receiver, self.loop, self.sender]
        self.receiver = self.loop = self.sender = self.prefiller = self.decoder = self.encoder.consumer = None
        await _close([part for part in closing if part is not None])

    async def close(self) -> None:
        """Stop threads and free memory."""
        await self.lifecycle.settled.wait()
        self.ready = self.is_accepting = False
        await self.clean_ups.cancel()
        await self.processor.close()
        await self.encoder.close()
        await self._close_language()
        if self.weights is not None:
            await asyncio.to_thread(self.weights.close)
        await self.peers.close()
        await asyncio.to_thread(self.store.close)
        self.transport.close()
        self.streams.board.close()
        await self.telemetry.close()

    # ------------------------------------------------------------------ calls

    def handlers(self) -> dict[str, Handler]:
        """Return the call handlers by path; see :mod:`epd_serve.protocol.wire`."""
        return ControlCalls(self).handlers()

    def check_role(self, role: Role) -> None:
        """Raise ValueError if the options or the model do not allow the role."""
        self.options.in_role(role)
        if not (self.family.token_ids or role.has_language_model):
            raise ValueError("the model is text-only, so an instance of role E has nothing to encode")

    def check_started(self) -> None:
        """Raise Unavailable until the model is loaded."""
        if not self.ready:
            raise Unavailable("the instance is loading its model")

    def check_ready(self) -> None:
        """Raise Unavailable while the instance loads or rebuilds its stages."""
        self.check_started()
        if self.lifecycle.state is SwitchState.REBUILDING:
            raise self.refusals.error()

    def check_accepting(self) -> None:
        """Raise Unavailable while the instance accepts no new requests."""
        if self.is_accepting:
            return
        self.check_ready()
        if self.lifecycle.is_leaving:
            raise Unavailable(f"instance {self.options.name} is shutting down", code=DRAINING)
        raise self.refusals.error()

    def info(self) -> instance_state.InstanceInfo:
        """Return the instance's identity and state. Raises Unavailable while it is loading."""
        self.check_started()
        options, lifecycle = self.options, self.lifecycle
        weights = None if self.loop is None else self.weights
        longest = options.max_model_len or self.model.max_positions
        tokens_per_pixel = 0.0
        if self.family.token_ids:
            tokens_per_pixel = self.family.num_tokens(self.family.typical) / self.family.typical.num_pixels
        return instance_state.InstanceInfo(
            name=options.name,
            role=str(lifecycle.role),
            url=self.url,
            model=options.served_model_name,
            model_path=self.model.location,
            max_model_len=weights.max_model_len if weights else longest,
            media_fingerprint=self.model.fingerprint,
            device=self.device.name if self.device.type == "emulated" else options.device,
            dtype=self.model.dtype,
            pid=os.getpid(),
            ready=self.is_accepting,
            load=self.load(),
            parameters={
                "tower": 0 if self.encoder.tower is None else self.encoder.tower.num_parameters,
                "language_model": weights.num_parameters if weights else 0,
            },
            share=self.streams.share,
            budgets=self.limits.summary(),
            host_id=host_id(),
            block_size=options.tokens_per_block if weights else 0,
            kv_token_bytes=weights.block_nbytes // options.tokens_per_block if weights else 0,
            tokens_per_pixel=tokens_per_pixel,
            feature_token_bytes=self.model.feature_token_bytes,
            epoch=lifecycle.epoch,
            num_restarts=int(os.environ.get(instance_state.RESTARTS, 0)),
            state=lifecycle.state,
            modalities=tuple(self.family.token_ids),
            usage=self._usage(),
            assists=options.assist and str(lifecycle.role) == "EPD",
            producer=self.model.producer,
            splits_videos=self.family.splits_videos and "video" in self.family.token_ids,
        )

    def _usage(self) -> instance_state.Usage:
        """Measure the host and device resources that this process uses."""
        times = os.times()
        total = free = 0
        if self.device.type != "cpu":
            with suppress(RuntimeError):  # the device failed; its probe reports that
                total, free = self.device.memory()
        return instance_state.Usage(
            at_s=time.monotonic(),
            cpu_s=times.user + times.system,
            memory_bytes=psutil.Process().memory_info().rss,
            device_bytes=total - free,
            device_total_bytes=total,
            busy_s=dict(self.telemetry.rates.busy_s),
        )

    def load(self) -> instance_state.Load:
        """Return the current load, including requests not in the engine yet. The instance must be ready."""
        load = instance_state.Load() if self.loop is None else self.loop.engine.load()
        prompts = () if self.prefiller is None else self.prefiller.requests.values()
        requests = () if self.decoder is None else self.decoder.requests.values()
        return msgspec.structs.replace(
            load,
            num_waiting_tokens=load.num_waiting_tokens + sum(p.num_tokens for p in prompts if p.sequence is None),
            num_expected=sum(not one.generation.done() for one in requests),
            num_waiting_encodes=self.encoder.num_waiting,
            num_waiting_pixels=self.encoder.num_waiting_pixels,
            mean_output_tokens=self.telemetry.rates.mean_output_tokens,
            tokens_per_character=self.telemetry.rates.tokens_per_character,
            rates=self.telemetry.rates.report(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless all caches are consistent."""
        self.store.check_integrity()
        if self.loop is not None and self.receiver is not None and self.weights is not None:
            self.loop.engine.check_integrity()
            self.receiver.check_integrity()
            self.weights.memory.check_integrity()
        if self.decoder is not None:
            self.decoder.check_integrity()

    def in_use(self) -> dict[str, int]:
        """Return counts of resources in use, by kind; all zero on an idle instance."""
        in_use = {
            "calls": len(self.refusals),
            "features_held": self.store.num_owners,
            "encodes": self.encoder.num_waiting,
            "preparations": self.processor.num_waiting,
        }
        if self.loop is not None and self.receiver is not None and self.weights is not None:
            load = self.loop.engine.load()
            in_use |= {
                "blocks": load.total_blocks - load.free_blocks,
                "sequences": load.num_running + load.num_waiting,
                "staged": self.weights.memory.num_staged,
                "feature_owners": self.receiver.num_owners,
                "answers": len(self.outbox.receivers),
                "timeline": self.telemetry.timeline.num_requests,
            }
        if self.prefiller is not None:
            in_use["prompts"] = len(self.prefiller.requests)
        if self.decoder is not None:
            in_use["reservations"] = self.decoder.num_reservations
        return in_use

    def render_metrics(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        streams = self.streams
        return self.telemetry.metrics.render(
            self.load(),
            (self.store.num_owners, self.store.num_bytes),
            self.sender.sizer.known_links() if self.sender else {},
            prefix_tokens=self.loop.engine.prefix_lookups() if self.loop else (0, 0),
            paused_s=streams.tower.paused_s,
            slack=streams.language.slack,
        )

    def require_prefiller(self) -> Prefiller:
        """Return the prefill stage. Raises Unavailable if the role lacks it or while the instance is loading."""
        if self.prefiller is None:
            raise self._lacks("prefill")
        return self.prefiller

    def require_decoder(self) -> Decoder:
        """Return the decode stage. Raises Unavailable if the role lacks it or while the instance is loading."""
        if self.decoder is None:
            raise self._lacks("decode")
        return self.decoder

    def _lacks(self, stage: str) -> Unavailable:
        self.check_ready()
        message = f"instance {self.options.name} has role {self.options.role} and does not {stage}"
        return Unavailable(message, code=DRAINING)  # the caller may know only the old role

    # ------------------------------------------------------------------ another role

    def state_changed(self) -> None:
        """Update ``is_accepting`` after a change of the lifecycle, and report it at once."""
        lifecycle = self.lifecycle
        self.is_accepting = self.ready and not lifecycle.is_leaving and lifecycle.state is SwitchState.SERVING
        self.reports.send_now()

    def send_away(self, *, begun: bool) -> None:
        """Refuse requests that have not begun; with ``begun``, also give up those that can continue elsewhere."""
        if self.decoder is not None:
            self.decoder.drop_orphans()
        for answer in list(self.outbox.receivers.values()) if begun else ():
            if isinstance(answer, Generation) and answer.can_move:
                answer.fail(self.refusals.error(InstanceFailed))
        self.refusals.refuse(begun=begun)

    async def rebuild(self, role: Role) -> None:
        """Switch to another role; nothing may be in use. Raises if its stages cannot be built.

        With ``resident: all``, weights that the role does not need stay loaded.
        """
        old, options = self.options, self.options.in_role(role)
        options.remember_role()
        await self._close_language()
        # an encode role's store takes device memory, or lends host memory to Mooncake
        lends = (old.feature_store == "mooncake" or self.store.on_device) and old.role.stages != role.stages
        self.options = options
        if self.weights is not None and not role.has_language_model:
            await asyncio.to_thread(self.weights.forget, self.transport)
            if options.resident == "role":
                await _close([self.weights])
                self.weights = None
        if options.resident == "role" and not role.encodes:
            self.encoder.tower = None
        if lends or old.sizes.feature_cache_bytes != options.sizes.feature_cache_bytes:
            await asyncio.to_thread(self.store.close)
            self.store = await self._new_store()
        if self.device.type != "cpu":
            gc.collect()  # reference cycles keep the old role's KV and model on the device
        await self._build()

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            watches = {"the tower": self.encoder.watch}
            if self.loop is not None:
                watches["the language model"] = self.loop.watch
            for part, watch in watches.items():
                if (how_long := watch.overdue()) is not None:  # a thread cannot be interrupted in its step
                    logger.critical("%s hangs: %s; this process ends", part, how_long)
                    pace.end_process()
            try:
                if self.decoder is not None:
                    self.decoder.expire()
                if self.receiver is not None:
                    self.receiver.expire()
            except Exception:  # without housekeeping the instance would leak from now on
                logger.exception("housekeeping failed")


async def _close(parts: list[Any]) -> None:
    """Close the parts on a thread, in order, and empty the list.

    No reference to a part remains afterwards, so that garbage collection can free its device memory.
    """

    def close() -> None:
        while parts:
            parts.pop(0).close()

    await asyncio.to_thread(close)


def start_transport(options: InstanceOptions, device: BareDevice) -> Transport:
    """Start the transport. Raises ValueError if Mooncake is missing or does not support the device."""
    if options.kv_transfer.transport == "mooncake":
        transport: Transport = MooncakeTransport(_mooncake_options(options, device), cluster_key())
    else:
        transport = EmbeddedTransport(
            options.host,
            options.kv_transfer.transport,
            options.peer_timeout_s / _READS_PER_LEASE,
            port=options.data_port,
            advertise=options.advertise,
            key=cluster_key(),
        )
    return factory("transport", as_it_is)(transport)


def start_feature_store(
    options: InstanceOptions, transport: Transport, device: BareDevice, observe: StoreObserver, producer: str
) -> FeatureStore:
    """Start the feature store. Blocks. Raises ValueError if Mooncake is missing or its master does not answer.

    An instance whose role encodes lends ``feature_cache_bytes`` to a shared Mooncake store.
    """
    capacity_bytes = options.sizes.feature_cache_bytes
    local = EmbeddedFeatureStore(transport, capacity_bytes, observe)
    if options.feature_store == "embedded" or not (options.role.encodes or options.role.prefills):
        return local
    if options.mooncake.master is None:
        raise ValueError("feature_store mooncake needs the address of its master")
    segment_bytes = capacity_bytes if options.role.encodes else 0
    if 0 < segment_bytes < MIN_SEGMENT_BYTES:
        raise ValueError(f"Mooncake Store needs at least {MIN_SEGMENT_BYTES} bytes; raise feature_cache_bytes")
    mooncake = _mooncake_options(options, device)
    engine = transport.engine if isinstance(transport, MooncakeTransport) else None
    client = StoreClient(mooncake, options.mooncake.master, segment_bytes, engine=engine)
    return MooncakeFeatureStore(client, local, mooncake, observe, producer)


def _mooncake_options(options: InstanceOptions, device: BareDevice) -> MooncakeOptions:
    capability = TRANSPORTS[device.type]
    protocol = capability.mooncake_protocols[0]
    if options.mooncake.devices is not None:
        protocol = "rdma"
        if protocol not in capability.mooncake_protocols:
            raise ValueError(f"mooncake.devices: RDMA does not support {device.type} memory; remove the option")
    return MooncakeOptions(
        host=options.advertise or options.host,
        protocol=protocol,
        devices=options.mooncake.devices or "",
        staging_bytes=options.staging_bytes,
        timeout_s=options.peer_timeout_s / _READS_PER_LEASE,
        alignment_bytes=capability.alignment_bytes,
        max_regions=capability.max_regions,
        device=device.type if protocol in capability.device_protocols else "",
        activate=device.activate,
    )
