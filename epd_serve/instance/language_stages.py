"""The stages that need the language model: its weights, its KV, its engine, prefill and decode."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from epd_serve.cache.block_pool import BlockPool
from epd_serve.instance.decode import DecodeService
from epd_serve.instance.feature_form import FeatureForm
from epd_serve.instance.feature_inbox import FeatureInbox
from epd_serve.instance.feature_supply import FeatureSupply
from epd_serve.instance.kv_delivery import Delivery, PullDelivery, PushDelivery
from epd_serve.instance.language_parts import LanguageParts, Surroundings
from epd_serve.instance.migration import Migrations
from epd_serve.instance.prefill import PrefillService
from epd_serve.instance.probe import EngineProbe
from epd_serve.protocol import wire
from epd_serve.request import Sequence
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender
from epd_serve.worker.engine import Engine
from epd_serve.worker.events import Listeners
from epd_serve.worker.kv_memory import block_nbytes
from epd_serve.worker.runner import LanguageRunner

_ORPHAN_S = 10.0


class LanguageStages:
    """Prefill and decode of one instance. Making it loads the weights, and takes as long; call ``start`` next."""

    def __init__(self, around: Surroundings, parts: LanguageParts | None = None) -> None:
        """``parts`` are those of the role before. Raises ValueError for a model that cannot be served."""
        self._around = around
        self.listeners = Listeners()
        self.parts = parts = parts or LanguageParts(around)
        runner = parts.prepare(around)
        self._memory, self._layout = parts.memory, parts.layout
        self.max_model_len = parts.max_model_len
        around.batching.find_budget(
            runner,
            num_blocks=self._memory.num_blocks,
            num_position_axes=around.family.num_position_axes,
            max_model_len=self.max_model_len,
        )
        self._start_features()
        self._start_engine(runner)
        self._start_services()

    def _start_features(self) -> None:
        around = self._around
        self.inbox = FeatureInbox(
            around.options.feature_cache_bytes,
            around.store.fetch,
            lambda: self.engine.wake(),
            form=FeatureForm(
                dtype=self._layout.dtype,
                width=self.parts.language.feature_width,
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

    def _start_engine(self, runner: LanguageRunner) -> None:
        around, options, memory = self._around, self._around.options, self._memory
        sizer = GroupSizer(num_layers=self._layout.num_layers, fixed=options.kv_group_layers)
        self.sender = KVSender(around.transport, memory, sizer, time.monotonic, around.metrics.kv_written)
        pool = BlockPool(memory.num_blocks, options.tokens_per_block)
        self.engine = Engine(
            runner,
            pool,
            around.batching.budget,
            num_layers=self._layout.num_layers,
            eos_token_ids=self.parts.eos_token_ids,
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
            on_death=end_process,
            order=around.batching.order(pool),
            runs_ahead=options.runs_ahead,
        )

    def _start_services(self) -> None:
        around, options, engine = self._around, self._around.options, self.engine
        prompts = self.parts.prompts
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
            refusals=around.refusals,
        )
        self.migrations = Migrations(
            options.name,
            engine,
            self.sender,
            self._deliver,
            self._layout,
            lease_s=options.lease_s,
            loop=around.loop,
            spawn=around.spawn,
        )
        self.probe = EngineProbe(engine, around.family.num_position_axes, self.listeners.listen)
        self.decode = DecodeService(
            engine,
            self._memory,
            prompts.vocabulary,
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
        return self.parts.language.num_parameters

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
        """Stop the engine; the parts stay. Blocks."""
        self.inbox.close()
        self.engine.close()

    def send_away(self, *, begun: bool, late: bool) -> None:
        """See :class:`~epd_serve.instance.switching.Stages`."""
        self.decode.send_away()
        if begun:
            self.migrations.send_away(self.decode.generations | self.prefill.generations, late=late)

    def expire(self) -> None:
        """End what has waited for too long; to be called now and then, on the event loop."""
        self.decode.expire()
        self.migrations.expire()
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


def end_process() -> None:
    """An instance is whole or gone: whoever started it starts it again."""
    logging.shutdown()
    os._exit(1)
