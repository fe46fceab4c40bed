"""The step loop: launch a step, send KV layer by layer, read tokens, pass them to the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from device.base import BareDevice, Event
from epd_serve.engine import pace
from epd_serve.engine.dual_stream import LanguageStream
from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent, SampledTokens
from epd_serve.engine.pace import StepLimits, StepWatch
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.protocol.wire import KVLayout
from epd_serve.sched import schedule as sched
from epd_serve.sched.schedule import ScheduleOutput, possible_prefills
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.grouping import group_ends
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part

logger = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step on the device. Call ``sample``, then ``read``."""

    def sample(self) -> None:
        """Launch the choice of tokens; all earlier tokens must be known."""
        ...

    def read(self) -> SampledTokens:
        """Wait for the step and return its tokens."""
        ...


class Runner(Protocol):
    """Turns a schedule into a step of the language model."""

    def activate(self) -> None:
        """Make its device current for this thread, which will launch steps."""
        ...

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Any],
        on_layer: Callable[[int], None] | None = None,
        before: Any = None,
    ) -> LaunchedStep:
        """Launch the computation of the scheduled tokens without waiting for it.

        Args:
            features_by_hash: features of all media that overlap the chunks.
            on_layer: called on this thread once the work that writes a layer's KV is launched.
            before: the step whose tokens replace the placeholders.
        """
        ...


class Features(sched.Features, Protocol):
    """The encoder outputs that prompts need, for the engine's thread."""

    def use(self, mm_hash: str) -> Any | None:
        """Return encoder output [tokens, width] for the current step; may fetch it. None if unavailable."""
        ...


class StepLoop:
    """Runs the steps of an engine on a separate thread, with device work on ``stream``.

    A loop that runs ahead launches a step before it knows the tokens of the previous one: the device passes them
    on, and the engine holds placeholders.

    Attributes:
        watch: detects steps that hang.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        features: Features,
        stream: LanguageStream,
        telemetry: InstanceTelemetry,
        *,
        limits: StepLimits | None = None,
        push: KVPush | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self.engine = engine
        engine.queues.features = self._features = features
        self._runner = runner
        self._stream = stream
        self._telemetry = telemetry
        self._limits = limits
        self._push = push
        self._runs_ahead = runs_ahead
        self.watch = StepWatch()
        self._warm_up: Callable[[], None] = lambda: None
        self._is_warm = threading.Event()
        self._in_flight: InFlightStep | None = None  # launched, with unknown tokens
        self._landed_s = 0.0
        self._events: list[EngineEvent] = []  # of finished steps, not yet emitted
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, warm_up: Callable[[], None] | None = None) -> None:
        """Start the thread, and return once it has called ``warm_up``."""
        self._warm_up = warm_up or self._warm_up
        self._thread.start()
        self._is_warm.wait()

    def close(self) -> None:
        """Stop after the current step."""
        self.engine.close()
        if self._thread.ident is not None:
            self._thread.join()

    def step(self) -> bool:
        """Run one step without the thread, for tests. Returns False if there was no work."""
        in_flight = self._in_flight.output if self._in_flight else None
        output = self.engine.plan(in_flight)
        self._advance(output)
        return bool(output) or in_flight is not None

    def _run(self) -> None:
        engine = self.engine
        try:
            self._runner.activate()
            with self._stream.stream:
                self._warm_up()  # here, because libraries keep handles and plans per thread
                self._is_warm.set()
                while True:
                    in_flight = self._in_flight.output if self._in_flight else None
                    with engine.changed:
                        while (
                            not engine.is_closing and not (output := engine.plan(in_flight)) and in_flight is None
                        ):
                            self._stream.idle()
                            engine.changed.wait()
                        if engine.is_closing:
                            return
                    with self.watch.step((_kind(in_flight), _kind(output))):
                        self._advance(output)
        except BaseException:  # otherwise the engine would stop silently
            logger.critical("the engine's thread has ended", exc_info=True)
            pace.end_process()
            self._is_warm.set()

    def _advance(self, output: ScheduleOutput) -> None:
        """Launch a step and finish the one in flight; finish both unless the loop runs ahead.

        Events are emitted after the launch, because their receiver may hold the interpreter's lock.
        """
        before, self._in_flight = self._in_flight, None
        step: InFlightStep | None = None
        if output:
            with self._failing(output, before):
                step = self._launch(output, before)
        if before is not None:
            self._land(before, step)
        if step is not None:
            with self._failing(step.output, None):
                if step.launched is not None:
                    step.launched.sample()
                self.engine.advance(step.output, placeholders=self._runs_ahead)
                self._in_flight = step
        if not self._runs_ahead and (step := self._in_flight) is not None:
            self._in_flight = None
            self._land(step, None)
        if self._events:
            events, self._events = self._events, []
            self.engine.outbox.emit(events)

    def _launch(self, output: ScheduleOutput, before: InFlightStep | None) -> InFlightStep:
        """Launch the part of a step whose features are available."""
        features: dict[str, Any] = {}

        def take(mm_hash: str) -> bool:
            if features.get(mm_hash) is None:
                features[mm_hash] = self._features.use(mm_hash)
            return features[mm_hash] is not None

        if output.prefills:
            output = replace(output, prefills=possible_prefills(output.prefills, take))
        groups = None
        if self._push is not None:
            groups = self._push.layer_groups(self._push, output, self.engine.transfers)
        launched_s, launched = time.monotonic(), None
        if output:
            with self._stream.step():
                on_layer = groups.on_layer if groups else None
                launched = self._runner.launch(output, features, on_layer, before.launched if before else None)
        return InFlightStep(output, launched, groups, launched_s, features)

    def _land(self, step: InFlightStep, after: InFlightStep | None) -> None:
        """Wait for a step's tokens and pass them to the engine; ``after`` is the step launched since."""
        with self._failing(step.output, after):
            sampled = [] if step.launched is None else step.launched.read()
            if step.groups is not None:
                step.groups.on_computed()
            events = self.engine.finish(sampled, step.output, after.output if after else None)
            self._events += events
            if events and isinstance(events[0], FailureEvent):  # NaN logits: the device may be lost
                pace.end_if_lost(self._stream.device)
            now = time.monotonic()
            seconds, self._landed_s = now - max(step.launched_s, self._landed_s), now
            try:
                if step.output.prefills and self._push is not None:
                    self._push.sender.sizer.observe_compute(step.output.num_tokens, seconds)
                if step.output:
                    self._telemetry.add_step(step.output, seconds)
                    self._stream.stepped(step.output, seconds, self.engine.queues.num_running)
                    if self._limits is not None:
                        self._limits.stepped(step.output, seconds)
            except Exception:  # must not lose the step's tokens
                logger.exception("accounting for a step failed")

    @contextmanager
    def _failing(self, output: ScheduleOutput, other: InFlightStep | None) -> Iterator[None]:
        """Fail a step's requests, not the instance, if the step fails; ``other`` is a step still in flight."""
        try:
            yield
        except Exception as error:
            logger.exception("a step of %d tokens failed", output.num_tokens)
            pace.end_if_lost(self._stream.device)
            self._stream.idle()
            self._events += self.engine.fail(output, other.output if other else None, error)


def _kind(output: ScheduleOutput | None) -> tuple[int, bool]:
    """Return a step's kind for the watch: its tokens, to a power of two, and whether it has prefills."""
    return (0, False) if output is None else (output.num_tokens.bit_length(), bool(output.prefills))


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A step and its launch. ``launched`` is None if no feature was available, so that nothing is computed.

    It holds ``features``, because the device may read them until the step ends.
    """

    output: ScheduleOutput
    launched: LaunchedStep | None
    groups: LayerGroups | None
    launched_s: float
    features: dict[str, Any]


@dataclass(slots=True, eq=False)
class SendLane:
    """Parts of prompts for one decode instance, and the layers after which they are sent."""

    parts: list[Part]
    ends: frozenset[int]
    next_layer: int = 0


class LayerGroups:
    """Outgoing KV of one step. The model calls ``on_layer``; ``on_computed`` ends the step."""

    def __init__(self, push: KVPush, output: ScheduleOutput, transfers: dict[Sequence, OutgoingTransfer]) -> None:
        self._push = push
        num_layers, block_size = push.layout.num_layers, push.layout.block_size
        self._finished: list[OutgoingTransfer] = []
        parts: defaultdict[str, list[Part]] = defaultdict(list)
        states: defaultdict[str, list[Part]] = defaultdict(list)
        for sequence, count in output.prefills:
            if (transfer := transfers.get(sequence)) is None:
                continue
            target, end = transfer.target, sequence.num_computed + count
            assert target is not None, "a transfer has blocks at D before its prompt is computed"
            if end == sequence.num_tokens:
                self._finished.append(transfer)
                if state := sequence.state_blocks:
                    states[target.name].append(Part(transfer, state, target.block_ids[-len(state) :]))
            first, stop = transfer.next_block, -(-end // block_size)
            if first < stop:
                part = Part(transfer, sequence.blocks[first:stop], target.block_ids[first:stop])
                parts[target.name].append(part)
                # a partially filled block is sent again with the next chunk
                transfer.next_block = max(first, end // block_size)
        self._lanes: list[SendLane] = []
        for name, of_lane in parts.items():
            nbytes = push.layer_bytes * sum(len(part.local) for part in of_lane)
            group_size = push.sender.sizer.group_size(name, output.num_tokens, nbytes)
            self._lanes.append(SendLane(of_lane, group_ends(num_layers, group_size)))
        # every block of a state holds parts of the last layer's
        self._lanes += [SendLane(of_lane, frozenset({num_layers - 1})) for of_lane in states.values()]

    def on_layer(self, layer: int) -> None:
        """Send the KV of a layer group; launched work writes the layer's K and V into the cache."""
        if ending := [lane for lane in self._lanes if layer in lane.ends]:
            computed = self._push.device.record_event()
            for lane in ending:
                self._send(lane, range(lane.next_layer, layer + 1), computed)
                lane.next_layer = layer + 1

    def on_computed(self) -> None:
        """Note that the step is computed, including first tokens."""
        now = time.monotonic()
        for transfer in self._finished:
            transfer.computed_at = now

    def _send(self, lane: SendLane, layers: range, computed: Event) -> None:
        self._push.sender.push(layers, lane.parts, computed)


@dataclass(frozen=True, slots=True)
class KVPush:
    """Sends the KV of prompts to decode instances, one group of layers at a time (EPD-Serve 3.3).

    ``layer_bytes``: K and V of one block in one layer.
    """

    sender: KVSender
    layout: KVLayout
    layer_bytes: int
    device: BareDevice
    layer_groups: type[LayerGroups] = LayerGroups
