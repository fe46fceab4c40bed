"""A step from its launch to its tokens, with what goes on around it: features, outgoing KV, time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from epd_serve.request import Sequence
from epd_serve.sched.language import ScheduleOutput
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.types import KVMode
from epd_serve.worker.layer_groups import LayerGroups
from epd_serve.worker.runner import LanguageRunner, LaunchedStep, StepResult
from epd_serve.worker.step_features import with_features


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that was launched. ``step`` is None where no feature could be had: nothing is computed."""

    output: ScheduleOutput
    step: LaunchedStep | None
    groups: LayerGroups | None
    launched_s: float


class Stepper:
    """Launches one step after the other; the arguments are those of :class:`~epd_serve.worker.engine.Engine`."""

    def __init__(
        self,
        runner: LanguageRunner,
        *,
        feature_of: Callable[[str], Tensor | None],
        transfers: Mapping[Sequence, OutgoingTransfer],
        sender: KVSender | None,
        kv_mode: KVMode,
        num_layers: int,
        block_size: int,
        layer_bytes: int,
        record_event: Callable[[], Callable[[], None]],
        around_step: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._feature_of = feature_of
        self._transfers = transfers
        self._sender = sender
        self._kv_mode = kv_mode
        self._num_layers = num_layers
        self._block_size = block_size
        self._layer_bytes = layer_bytes
        self._record_event = record_event
        self._around_step = around_step
        self._clock = clock
        self._landed_s = 0.0

    def launch(self, output: ScheduleOutput, before: Flight | None) -> Flight:
        """Give a step to the device, as far as its features can be had.

        Args:
            before: the step whose tokens the host does not know yet.
        """
        output, features = with_features(output, self._feature_of)
        groups = self._layer_groups(output)
        launched_s, step = self._clock(), None
        if output:
            with self._around_step():
                on_layer = groups.on_layer if groups else None
                step = self._runner.launch(output, features, on_layer, before.step if before else None)
        return Flight(output, step, groups, launched_s)

    def sample(self, flight: Flight) -> None:
        """Let the device choose the step's tokens; all tokens before them must be known."""
        if flight.step is not None:
            flight.step.sample()

    def read(self, flight: Flight) -> StepResult:
        """Wait for the step's tokens."""
        result = StepResult([], []) if flight.step is None else flight.step.read()
        if flight.groups is not None:
            flight.groups.on_computed()
        return result

    def landed(self, flight: Flight) -> float:
        """The step is over: the seconds that it took, less those in which the device was at the one before."""
        now = self._clock()
        seconds, self._landed_s = now - max(flight.launched_s, self._landed_s), now
        if flight.output.prefills and self._sender is not None:
            self._sender.sizer.observe_compute(flight.output.num_tokens, seconds)
        return seconds

    def _layer_groups(self, output: ScheduleOutput) -> LayerGroups | None:
        if self._sender is None:
            return None
        return LayerGroups(
            output,
            self._transfers,
            self._sender,
            mode=self._kv_mode,
            num_layers=self._num_layers,
            block_size=self._block_size,
            layer_bytes=self._layer_bytes,
            record_event=self._record_event,
            clock=self._clock,
        )
