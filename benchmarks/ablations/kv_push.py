"""KV sent layer by layer or prompt by prompt, which groups of layers are compared with (EPD-Serve section 3.3)."""

from __future__ import annotations

from dataclasses import replace

from device.base import Event
from epd_serve.engine.step_loop import KVPush, LayerGroups, SendLane
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import OutgoingTransfer


class SingleLayers(LayerGroups):
    """Each layer of each prompt by itself."""

    def __init__(self, push: KVPush, output: ScheduleOutput, transfers: dict[Sequence, OutgoingTransfer]) -> None:
        push.sender.sizer.fixed = 1  # no write is joined to another then
        super().__init__(push, output, transfers)

    def _send(self, lane: SendLane, layers: range, computed: Event) -> None:
        for part in lane.parts:
            self._push.sender.push(layers, [part], computed)


class WholePrompts(LayerGroups):
    """All of a prompt once it is computed."""

    def __init__(self, push: KVPush, output: ScheduleOutput, transfers: dict[Sequence, OutgoingTransfer]) -> None:
        last = [(one, count) for one, count in output.prefills if one.num_computed + count == one.num_tokens]
        push.sender.sizer.fixed = push.layout.num_layers
        super().__init__(push, replace(output, prefills=last), transfers)

    def on_layer(self, layer: int) -> None:
        return

    def on_computed(self) -> None:
        super().on_computed()
        for lane in self._lanes:
            self._push.sender.push(range(self._push.layout.num_layers), lane.parts)


LAYER_GROUPS = {"layerwise": SingleLayers, "oneshot": WholePrompts}
