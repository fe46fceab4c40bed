"""The outgoing KV of one step, handed to the sender a group of layers at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from epd_serve.request import Sequence
from epd_serve.sched.language import ScheduleOutput
from epd_serve.transfer.grouping import group_ends
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.types import KVMode


class LayerGroups:
    """Made for one step; ``on_layer`` is the model's hook, ``on_computed`` is for the end of the step.

    Args:
        layer_bytes: of one block in one layer, K and V.
        record_event: marks the device's work so far; what it returns waits for that work.
        clock: the sender's.
    """

    def __init__(
        self,
        output: ScheduleOutput,
        transfers: Mapping[Sequence, OutgoingTransfer],
        sender: KVSender,
        *,
        mode: KVMode,
        num_layers: int,
        block_size: int,
        layer_bytes: int,
        record_event: Callable[[], Callable[[], None]],
        clock: Callable[[], float],
    ) -> None:
        self._mode = mode
        self._sender = sender
        self._record_event = record_event
        self._clock = clock
        self._num_layers = num_layers
        self._finished: list[OutgoingTransfer] = []
        parts: defaultdict[str, list[Part]] = defaultdict(list)
        for sequence, count in output.prefills:
            transfer = transfers.get(sequence)
            if transfer is None:
                continue
            end = sequence.num_computed + count
            if end == sequence.num_tokens:
                self._finished.append(transfer)
            elif mode == "oneshot":
                continue
            first, stop = transfer.next_block, -(-end // block_size)
            if transfer.target is not None and first < stop:
                part = Part(transfer, sequence.blocks[first:stop], transfer.target.block_ids[first:stop])
                parts[transfer.target.region.name].append(part)
                # a block that the chunk fills in part is sent again with the next chunk
                transfer.next_block = max(first, end // block_size)
        self._lanes = [
            _Lane(of_lane, self._ends(region_name, of_lane, output.num_tokens, layer_bytes))
            for region_name, of_lane in parts.items()
        ]

    def on_layer(self, layer: int) -> None:
        """The layer's K and V are in the cache, or will be when the device's work so far is done."""
        if self._mode == "oneshot":
            return
        ending = [lane for lane in self._lanes if layer in lane.ends]
        if ending:
            wait = self._record_event()
            for lane in ending:
                self._push(lane, range(lane.next_layer, layer + 1), wait)
                lane.next_layer = layer + 1

    def on_computed(self) -> None:
        """All of the step is computed, first tokens included."""
        now = self._clock()
        for transfer in self._finished:
            transfer.computed_at = now
        if self._mode == "oneshot":
            for lane in self._lanes:
                self._push(lane, range(self._num_layers), lambda: None)

    def _push(self, lane: _Lane, layers: range, wait: Callable[[], None]) -> None:
        if self._mode == "layerwise":
            for part in lane.parts:
                self._sender.push(layers, [part], wait)
        else:
            self._sender.push(layers, lane.parts, wait)

    def _ends(self, region_name: str, parts: list[Part], num_tokens: int, layer_bytes: int) -> frozenset[int]:
        if self._mode != "grouped":
            return group_ends(self._num_layers, 1)
        nbytes = layer_bytes * sum(len(part.local) for part in parts)
        return group_ends(self._num_layers, self._sender.sizer.group_size(region_name, num_tokens, nbytes))


class _Lane:
    """What goes to one decode instance, and after which layers."""

    def __init__(self, parts: list[Part], ends: frozenset[int]) -> None:
        self.parts = parts
        self.ends = ends
        self.next_layer = 0
