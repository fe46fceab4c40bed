"""Stages that need the language model: engine, prefill and decode, for one role of the instance."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from epd_serve.cache.block_pool import BlockPool
from epd_serve.engine.engine import Engine, EngineEvent, EngineHooks, FailureEvent
from epd_serve.engine.pace import StepWatch
from epd_serve.engine.step_loop import KVPush, LayerGroups, StepLoop
from epd_serve.errors import ServeError
from epd_serve.factories import factory
from epd_serve.instance.decode import Decoder
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.lifecycle import end_if_lost, end_process
from epd_serve.instance.prefill import Prefiller
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance
    from epd_serve.instance.loading.model import Language


logger = logging.getLogger(__name__)


class LanguageEngine(EngineHooks):
    """Engine, prefill and decode of one instance in one role. Call ``loop.start()`` after construction."""

    def __init__(self, instance: Instance, weights: Language) -> None:
        """Allocate KV memory and capture graphs. Blocks. Raises ValueError if the options do not fit the model."""
        options, limits = instance.options, instance.limits
        self.instance = instance
        self.weights = weights
        self.watch = StepWatch()
        with instance.streams.language.loading():
            runner = weights.prepare(instance)
            self.memory = memory = weights.memory
            layout = memory.layout
            self.max_model_len = weights.max_model_len
            num_blocks = memory.num_blocks - layout.state_blocks
            limits.find_budget(
                weights.step_seconds(runner), num_blocks=num_blocks, max_model_len=self.max_model_len
            )
        group_layers = options.kv_transfer.group_layers
        fixed = None if group_layers == "auto" else group_layers
        self.sender = KVSender(memory, GroupSizer(num_layers=layout.num_layers, fixed=fixed), time.monotonic)
        pool = BlockPool(memory.num_blocks, options.tokens_per_block, state_blocks=layout.state_blocks)
        self.engine = factory("engine", Engine)(
            pool,
            memory,
            limits.budget,
            self,
            eos_token_ids=weights.eos_token_ids,
            sender=self.sender,
            order=limits.order(pool),
        )
        self.loop = StepLoop(
            self.engine,
            runner,
            self,
            push=KVPush(
                sender=self.sender,
                num_layers=layout.num_layers,
                block_size=layout.block_size,
                layer_bytes=weights.block_nbytes // layout.num_layers,
                record_event=instance.device.record_event,
                layer_groups=factory("layer groups", LayerGroups),
            ),
            stream=instance.streams.language.stream,
            runs_ahead=instance.device.type != "cpu",
            watch=self.watch,
            warm_up=partial(weights.warm_up, runner, options.sizes.max_num_batched_tokens),
        )
        telemetry = instance.telemetry
        self.receiver = factory("features", FeatureReceiver)(
            instance.store,
            self.engine,
            telemetry.metrics,
            weights.feature_form,
            capacity_bytes=options.sizes.feature_cache_bytes,
            timeout_s=options.feature_timeout_s,
        )
        self.prefiller = Prefiller(
            engine=self.engine,
            prompts=weights.prompts,
            receiver=self.receiver,
            language=self,
            processor=instance.processor,
            compiler=weights.compiler,
            timeline=telemetry.timeline,
        )
        self.decoder = Decoder(
            engine=self.engine,
            memory=memory,
            tokenizer=weights.prompts.tokenizer,
            transport=instance.transport,
            compiler=weights.compiler,
            telemetry=telemetry,
            queue_timeout_s=options.queue_timeout_s,
        )

    def close(self) -> None:
        """Stop the engine; the weights stay. Blocks."""
        self.receiver.close()
        self.loop.close()
        self.sender.close()

    # ------------------------------------------------------------------ for the engine

    def feature(self, mm_hash: str) -> Any | None:
        return self.receiver.use(mm_hash)

    def has_feature(self, mm_hash: str) -> bool:
        return self.receiver.has(mm_hash)

    def feature_starved(self, mm_hash: str) -> None:
        self.receiver.starved(mm_hash)

    def turn(self) -> AbstractContextManager[None]:
        language = self.instance.streams.language
        if language.tower is not None and language.tower.is_wanted:
            self.idle()  # an assistant's encodes go first
        return language.step()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        instance = self.instance
        instance.telemetry.add_step(output, seconds)
        instance.streams.language.stepped(output, seconds, self.engine.queues.num_running)
        instance.limits.stepped(output, seconds)
        instance.encoder.reconsider()

    def idle(self) -> None:
        self.instance.streams.language.idle()
        self.instance.encoder.reconsider()

    def failed(self) -> None:
        end_if_lost(self.instance.device)

    def died(self) -> None:
        end_process()

    def emit(self, events: list[EngineEvent]) -> None:
        if not self.instance.loop.is_closed():
            self.instance.loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            request_id = event.request_id if isinstance(event, FailureEvent) else event.sequence.request_id
            prompt = self.prefiller.requests.get(request_id)
            receiver = self.decoder.generation(request_id) or (prompt.receiver if prompt is not None else None)
            if receiver is None:
                continue
            try:
                receiver.feed(event)
            except Exception as error:  # one failed answer must not affect the others
                logger.exception("the answer to request %s failed", request_id)
                receiver.feed(FailureEvent(request_id, ServeError(f"the answer cannot be written: {error}")))

    def freed(self) -> None:
        if self.decoder.waiting and not self.instance.loop.is_closed():
            self.instance.loop.call_soon_threadsafe(self.decoder.grant)
