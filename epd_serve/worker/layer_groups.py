"""The outgoing KV of one step, handed to the sender a group of layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from epd_serve.request import Sequence
from epd_serve.sched.language import ScheduleOutput
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer


class LayerGroups:
    """Made for one step; ``on_layer`` is the model's hook.

    Args:
        record_event: marks the device's work so far; what it returns waits for that work.
    """

    def __init__(
        self,
        output: ScheduleOutput,
        transfers: Mapping[Sequence, OutgoingTransfer],
        sender: KVSender,
        *,
        num_layers: int,
        block_size: int,
        record_event: Callable[[], Callable[[], None]],
    ) -> None:
        self._sender = sender
        self._record_event = record_event
        self._last = num_layers - 1
        self._group_size = sender.sizer.group_size()
        self._next_layer = 0
        self._parts: list[tuple[OutgoingTransfer, list[int], list[int]]] = []
        self.num_blocks = 0
        for sequence, count in output.prefills:
            transfer = transfers.get(sequence)
            if transfer is None:
                continue
            end = sequence.num_computed + count
            first, stop = transfer.next_block, -(-end // block_size)
            if first < stop:
                self._parts.append((transfer, sequence.blocks[first:stop], transfer.target.block_ids[first:stop]))
                self.num_blocks += stop - first
            # a block that the chunk fills in part is sent again with the next chunk
            transfer.next_block = max(first, end // block_size)

    def on_layer(self, layer: int) -> None:
        """The layer's K and V are in the cache, or will be when the device's work so far is done."""
        if not self._parts or (layer + 1 - self._next_layer < self._group_size and layer != self._last):
            return
        wait = self._record_event()
        layers = range(self._next_layer, layer + 1)
        self._next_layer = layer + 1
        for transfer, local, remote in self._parts:
            self._sender.push(transfer, layers, local, remote, wait)
