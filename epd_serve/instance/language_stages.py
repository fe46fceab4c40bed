"""The stages that need the language model: its weights, its KV, its engine, prefill and decode."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from device.base import Device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions, decode_graph_sizes
from epd_serve.instance.decode import DecodeService
from epd_serve.instance.feature_form import FeatureForm
from epd_serve.instance.feature_inbox import FeatureInbox
from epd_serve.instance.feature_supply import FeatureSupply
from epd_serve.instance.kv_delivery import Delivery, PullDelivery, Pulls, PushDelivery
from epd_serve.instance.metrics import InstanceMetrics
from epd_serve.instance.peers import Peers
from epd_serve.instance.prefill import PrefillService
from epd_serve.instance.probe import EngineProbe
from epd_serve.instance.prompt import PromptProcessor
from epd_serve.instance.rates import StageRates
from epd_serve.instance.request_processor import RequestProcessor
from epd_serve.models.family import Family
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import eos_token_ids
from epd_serve.protocol import wire
from epd_serve.request import Sequence
from epd_serve.sched.language import ScheduleOutput
from epd_serve.transfer.feature_store import FeatureStore
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender
from epd_serve.transfer.transport import Transport
from epd_serve.worker.batching import Batching
from epd_serve.worker.commands import CreateCache
from epd_serve.worker.dual_stream import DualStream
from epd_serve.worker.engine import Engine
from epd_serve.worker.events import Listeners
from epd_serve.worker.followers import Followers
from epd_serve.worker.kv_memory import KVMemory, block_nbytes
from epd_serve.worker.runner import LanguageRunner
from epd_serve.worker.sizing import num_kv_blocks
from epd_serve.worker.step import StepExecutor

_ORPHAN_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the stages of an instance share.

    Attributes:
        fingerprint: see :class:`epd_serve.protocol.wire.InstanceInfo`.
        spawn: runs a clean-up in the background, owned by the instance.
        stepped: told of each step and the seconds it took, on the engine's thread.
    """

    options: InstanceOptions
    path: Path
    url: str
    device: Device
    dtype: torch.dtype
    fingerprint: str
    family: Family
    loop: asyncio.AbstractEventLoop
    transport: Transport
    store: FeatureStore
    peers: Peers
    pulls: Pulls
    processor: RequestProcessor
    streams: DualStream
    batching: Batching
    metrics: InstanceMetrics
    rates: StageRates
    spawn: Callable[[asyncio.Task[None]], None]
    stepped: Callable[[ScheduleOutput, float], None]


class LanguageStages:
    """Prefill and decode of one instance. Making it loads the weights, and takes as long; call ``start`` next."""

    def __init__(self, around: Surroundings) -> None:
        """Weights, cache and graphs, on all ranks. Raises ValueError for a model that cannot be served."""
        options, group = around.options, None
        self._around = around
        self._followers: Followers | None = None
        self.listeners = Listeners()
        if len(options.devices) > 1:
            self._followers = Followers(options, around.dtype)
            group = self._followers.join(around.device)
        self._language = language = LanguageModel(around.path, around.dtype, around.device, group)
        self._layout = layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=options.tokens_per_block,
            dtype=_name(around.dtype),
            model=around.fingerprint,
        )
        free_bytes = around.device.headroom()
        if self._followers is not None:
            free_bytes = min(free_bytes, self._followers.wait_joined())
        self._memory = memory = KVMemory(
            layout,
            num_kv_blocks(options, layout, around.device.type, free_bytes),
            around.device,
            around.transport,
            heads=language.kv_heads if self._followers else None,
            followers=self._followers,
        )
        # a sequence that is alone must be able to reach its end
        self.max_model_len = min(
            options.max_model_len or around.family.config.get_text_config().max_position_embeddings,
            language.max_model_len,
            (memory.num_blocks - 1) * options.tokens_per_block,
        )
        create = CreateCache(
            layout=layout,
            num_blocks=memory.num_blocks,
            slab=memory.region,
            num_position_axes=around.family.num_position_axes,
            graph_sizes=decode_graph_sizes(options.max_num_seqs) if options.role.decodes else [],
            max_model_len=self.max_model_len,
        )
        if self._followers is not None:
            self._followers.send(create)
        self._eos_token_ids = eos = eos_token_ids(around.path, around.family.config)
        runner = LanguageRunner(
            StepExecutor.for_cache(language, around.device, memory.tensor, create),
            around.device.ops,
            block_size=options.tokens_per_block,
            num_position_axes=around.family.num_position_axes,
            eos_token_ids=eos,
            followers=self._followers,
        )
        around.batching.find_budget(
            runner,
            num_blocks=memory.num_blocks,
            num_position_axes=around.family.num_position_axes,
            max_model_len=self.max_model_len,
        )
        self._start_features()
        self._start_engine(runner, eos)
        self._start_services()

    def _start_features(self) -> None:
        around = self._around
        self.inbox = FeatureInbox(
            around.options.feature_cache_bytes,
            around.store.fetch,
            lambda: self.engine.wake(),
            form=FeatureForm(
                dtype=self._layout.dtype,
                width=self._language.feature_width,
                num_tokens=around.family.num_image_tokens,
            ),
            orphan_s=_ORPHAN_S,
            clock=time.monotonic,
        )
        self.supply = FeatureSupply(
            self.inbox,
            around.loop,
            around.options.feature_prefetch,
            clock=time.monotonic,
            wake=lambda: self.engine.wake(),
            observe=around.metrics.feature_used,
        )

    def _start_engine(self, runner: LanguageRunner, eos: frozenset[int]) -> None:
        around, options, memory = self._around, self._around.options, self._memory
        sizer = GroupSizer(num_layers=self._layout.num_layers, fixed=options.kv_group_layers)
        self.sender = KVSender(around.transport, memory, sizer, time.monotonic, around.metrics.kv_written)
        pool = BlockPool(memory.num_blocks, options.tokens_per_block)
        self.engine = Engine(
            runner,
            pool,
            around.batching.budget,
            num_layers=self._layout.num_layers,
            eos_token_ids=eos,
            feature_of=self.supply.take,
            has_feature=self.supply.has,
            on_starved=self.supply.starved,
            memory=memory,
            block_nbytes=block_nbytes(self._layout),
            record_event=lambda: around.device.record_event().synchronize,
            sender=self.sender,
            kv_mode=options.kv_mode,
            emit=lambda events: self._call_on_loop(self.listeners.dispatch, events),
            on_free=lambda: self._call_on_loop(self._blocks_freed),
            around_step=around.streams.language.step,
            on_step=around.stepped,
            on_idle=around.streams.language.idle,
            on_death=_end_process,
            order=around.batching.order(pool),
            runs_ahead=options.runs_ahead,
        )

    def _start_services(self) -> None:
        around, options, engine = self._around, self._around.options, self.engine
        prompts = PromptProcessor(
            around.path,
            around.family,
            self._language.inner,
            max_model_len=self.max_model_len,
            block_size=options.tokens_per_block,
            on_prompt=around.rates.prompted,
            eos_token_ids=self._eos_token_ids,
        )
        self.prefill = PrefillService(
            engine,
            prompts,
            self.inbox,
            self._deliver,
            self._layout,
            processor=around.processor,
            timeline=around.metrics.timeline,
            feature_timeout_s=options.feature_timeout_s,
            lease_s=options.lease_s,
            listen=self.listeners.listen,
            spawn=around.spawn,
            delivered=around.metrics.kv_delivered,
            tokens_per_character=lambda: around.rates.tokens_per_character,
        )
        self.probe = EngineProbe(engine, around.family.num_position_axes, self.listeners.listen)
        self.decode = DecodeService(
            engine,
            self._memory,
            prompts.tokenizer,
            self._layout,
            transport=around.transport,
            peers=around.peers,
            queue_timeout_s=options.queue_timeout_s,
            orphan_s=_ORPHAN_S,
            listen=self.listeners.listen,
            on_read=around.metrics.kv_read,
            timeline=around.metrics.timeline,
            compile=lambda grammar: around.processor.run("text", 0.0, prompts.grammars.constraint, grammar),
        )

    @property
    def num_parameters(self) -> int:
        return self._language.num_parameters

    @property
    def kv_token_bytes(self) -> int:
        return block_nbytes(self._layout) // self._layout.block_size

    def load(self) -> wire.Load:
        """The engine's, with what has not come to it yet."""
        load = self.engine.load()
        return msgspec.structs.replace(
            load,
            num_waiting_tokens=load.num_waiting_tokens + self.prefill.num_preparing_tokens,
            num_expected=self.decode.num_expected,
        )

    def start(self) -> None:
        """Begin to step."""
        self.engine.start()

    def close(self) -> None:
        """Stop the engine, then the other ranks. Blocks."""
        self.inbox.close()
        self.engine.close()
        if self._followers is not None:
            self._followers.close()

    def expire(self) -> None:
        """End what has waited for too long; to be called now and then, on the event loop."""
        self.decode.expire()
        self.inbox.expire()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of all caches balance."""
        self.engine.check_integrity()
        self.inbox.check_integrity()
        self.decode.check_integrity()

    def in_use(self) -> dict[str, int]:
        """All zero on an idle instance."""
        load = self.engine.load()
        return {
            "blocks": load.total_blocks - load.free_blocks,
            "sequences": load.num_running + load.num_waiting,
            "reservations": self.decode.num_reservations,
            "feature_owners": self.inbox.num_owners,
            "listeners": len(self.listeners),
        }

    def _deliver(self, reserve: wire.ReserveRequest, sequence: Sequence, decode_url: str) -> Delivery:
        around = self._around
        if around.options.kv_mode == "pull":
            return PullDelivery(
                reserve, decode_url, sequence, self._memory, around.peers, around.pulls, source_url=around.url
            )
        return PushDelivery(
            reserve, decode_url, self.sender, around.peers, abort=self.engine.abort, spawn=around.spawn
        )

    def _blocks_freed(self) -> None:
        self.decode.blocks_freed()

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._around.loop.is_closed():
            self._around.loop.call_soon_threadsafe(function, *arguments)


def _end_process() -> None:
    """An instance is whole or gone: whoever started it starts it again."""
    logging.shutdown()
    os._exit(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
