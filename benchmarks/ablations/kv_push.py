"""KV sent layer by layer or prompt by prompt, which groups of layers are compared with (EPD-Serve section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epd_serve.engine.step_loop import KVPush, LayerGroups, SendLane
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sequence import Sequence
from epd_serve.transfer.grouping import group_ends
from epd_serve.transfer.kv_sender import OutgoingTransfer, Part


class SingleLayers(LayerGroups):
    """Each layer of each prompt by itself."""

    def _ends(self, region_name: str, parts: list[Part], num_tokens: int) -> frozenset[int]:
        return group_ends(self._push.num_layers, 1)

    def _send(self, lane: SendLane, layers: range, wait: Callable[[], None]) -> None:
        for part in lane.parts:
            self._push.sender.push(layers, [part], wait)


class WholePrompts(LayerGroups):
    """All of a prompt once it is computed."""

    def __init__(self, push: KVPush, output: ScheduleOutput, transfers: dict[Sequence, OutgoingTransfer]) -> None:
        last = [(one, count) for one, count in output.prefills if one.num_computed + count == one.num_tokens]
        super().__init__(push, replace(output, prefills=last), transfers)

    def on_layer(self, layer: int) -> None:
        return

    def on_computed(self) -> None:
        super().on_computed()
        for lane in self._lanes:
            self._send(lane, range(self._push.num_layers), lambda: None)


LAYER_GROUPS = {"layerwise": SingleLayers, "oneshot": WholePrompts}
