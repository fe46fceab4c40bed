"""The stages that need the language model: its weights, its KV, its engine, prefill and decode."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from epd_serve.cache.block_pool import BlockPool
from epd_serve.engine.computing import Runner
from epd_serve.engine.engine import Engine, EngineEvent, EngineHooks, Listeners
from epd_serve.engine.pace.step_watch import StepWatch
from epd_serve.engine.step_loop import KVPush, LayerGroups, StepLoop
from epd_serve.factories import factory
from epd_serve.instance import process
from epd_serve.instance.calls import moved
from epd_serve.instance.decode import ORPHAN_S, DecodeService
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.kv_delivery import Deliveries
from epd_serve.instance.loading.model import Language
from epd_serve.instance.prefill import PrefillService
from epd_serve.protocol import instance_state
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance


class LanguageEngine(EngineHooks):
    """Prefill and decode of one instance in one role; call ``start`` next."""

    def __init__(self, instance: Instance, weights: Language) -> None:
        """Raises ValueError for a model that cannot be served so. Blocks while KV memory and graphs are made."""
        self._instance = instance
        self.weights = weights
        self.listeners = Listeners()
        self.watch = StepWatch()
        with instance.streams.language.loading():
            runner = weights.prepare(instance)
            self._memory, self._layout = weights.memory, weights.layout
            self.max_model_len = weights.max_model_len
            instance.limits.find_budget(
                weights.step_seconds(runner),
                num_blocks=self._memory.num_blocks - self._layout.state_blocks,
                max_model_len=self.max_model_len,
            )
            for block in range(self._memory.num_blocks - self._layout.state_blocks, self._memory.num_blocks):
                self._memory.copy_block(0, block)  # the steps that were measured had their state there
        self._start_engine(runner)
        self.receiver = factory("features", FeatureReceiver)(
            instance.options.sizes.feature_cache_bytes,
            instance.store.fetch,
            self.engine.wake,
            form=weights.feature_form,
            orphan_s=ORPHAN_S,
            timeout_s=instance.options.feature_timeout_s,
            clock=time.monotonic,
            observe=instance.telemetry.metrics.feature_used,
        )
        self._start_services()

    def _start_engine(self, runner: Runner) -> None:
        instance, options, memory = self._instance, self._instance.options, self._memory
        group_layers = options.kv_transfer.group_layers
        fixed = None if group_layers == "auto" else group_layers
        sizer = GroupSizer(num_layers=self._layout.num_layers, fixed=fixed)
        self.sender = KVSender(memory, sizer, time.monotonic)
        pool = BlockPool(memory.num_blocks, options.tokens_per_block, state_blocks=self._layout.state_blocks)
        self.engine = factory("engine", Engine)(
            pool,
            memory,
            instance.limits.budget,
            self,
            eos_token_ids=self.weights.eos_token_ids,
            sender=self.sender,
            order=instance.limits.order(pool),
        )
        self._loop = StepLoop(
            self.engine,
            runner,
            self,
            push=KVPush(
                sender=self.sender,
                num_layers=self._layout.num_layers,
                block_size=self._layout.block_size,
                layer_bytes=self.weights.block_nbytes // self._layout.num_layers,
                record_event=instance.device.record_event,
                layer_groups=factory("layer groups", LayerGroups),
            ),
            stream=instance.streams.language.stream,
            runs_ahead=instance.device.type != "cpu",
            watch=self.watch,
        )

    def _start_services(self) -> None:
        instance, options, engine = self._instance, self._instance.options, self.engine
        compiler = self.weights.compiler(instance)
        self.prefill = PrefillService(
            engine,
            self.weights.prompts,
            self.receiver,
            Deliveries(
                engine,
                self.sender,
                self._memory,
                peers=instance.peers,
                telemetry=instance.telemetry,
                refusals=instance.refusals,
                clean_ups=instance.clean_ups,
                lease_s=options.lease_s,
            ),
            listeners=self.listeners,
            processor=instance.processor,
            compiler=compiler,
            telemetry=instance.telemetry,
        )
        self.decode = DecodeService(
            engine,
            self._memory,
            self.weights.prompts.vocabulary,
            transport=instance.transport,
            listeners=self.listeners,
            compiler=compiler,
            telemetry=instance.telemetry,
            queue_timeout_s=options.queue_timeout_s,
        )

    @property
    def kv_token_bytes(self) -> int:
        return self.weights.block_nbytes // self._layout.block_size

    def load(self) -> instance_state.Load:
        """The engine's, with what has not come to it yet."""
        load = self.engine.load()
        return msgspec.structs.replace(
            load,
            num_waiting_tokens=load.num_waiting_tokens + sum(self.prefill.preparing.values()),
            num_expected=sum(not generation.done() for generation in self.decode.expected.values()),
            num_refused=sum(waiting.request.num_sequences for waiting in self.decode.waiting),
        )

    def start(self) -> None:
        """Begin to step."""
        self._loop.start()

    def close(self) -> None:
        """Stop the engine; the weights stay. Blocks."""
        self.receiver.close()
        self._loop.close()
        self.sender.close()

    def send_away(self, *, begun: bool) -> None:
        """See :meth:`~epd_serve.instance.instance.Instance.send_away`."""
        self.decode.send_away()
        if begun:
            for generation in (self.decode.generations | self.prefill.generations).values():
                if generation.can_move:
                    generation.fail(moved(self._instance.options.name))

    def expire(self) -> None:
        """End what has waited for too long; to be called now and then, on the event loop."""
        self.decode.expire()
        if self.receiver.early:
            self.receiver.expire()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of all caches balance."""
        self.engine.check_integrity()
        self.receiver.check_integrity()
        self.decode.check_integrity()
        self._memory.check_integrity()

    def in_use(self) -> dict[str, int]:
        """All zero on an idle instance."""
        load = self.engine.load()
        return {
            "blocks": load.total_blocks - load.free_blocks,
            "sequences": load.num_running + load.num_waiting,
            "reservations": self.decode.num_reservations,
            "staged": self._memory.num_staged,
            "feature_owners": self.receiver.num_owners,
            "listeners": len(self.listeners),
        }

    # ------------------------------------------------------------------ for the engine

    def feature(self, mm_hash: str) -> Any | None:
        return self.receiver.use(mm_hash)

    def has_feature(self, mm_hash: str) -> bool:
        return self.receiver.has(mm_hash)

    def feature_starved(self, mm_hash: str) -> None:
        self.receiver.starved(mm_hash)

    def turn(self) -> AbstractContextManager[None]:
        return self._instance.streams.language.step()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        instance = self._instance
        instance.telemetry.add_step(output, seconds)
        instance.streams.language.stepped(output, seconds, self.engine.queues.num_running)
        instance.limits.stepped(output, seconds)
        if instance.encode.is_held:
            instance.encode.reconsider()

    def idle(self) -> None:
        self._instance.streams.language.idle()

    def failed(self) -> None:
        process.end_if_lost(self._instance.device)

    def died(self) -> None:
        process.end_process()

    def emit(self, events: list[EngineEvent]) -> None:
        if not self._instance.loop.is_closed():
            self._instance.loop.call_soon_threadsafe(self.listeners.dispatch, events)

    def freed(self) -> None:
        if self.decode.waiting and not self._instance.loop.is_closed():
            self._instance.loop.call_soon_threadsafe(self.decode.grant)
