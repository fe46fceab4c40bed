"""How many layers to send at once so that the transfer hides behind compute (EPD-Serve section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass


def smallest_hidden_group(
    num_layers: int, layer_s: float, layer_bytes: float, handshake_s: float, bytes_per_s: float
) -> int:
    """The smallest g with ``handshake + g·bytes/bandwidth <= g·layer``, at most ``num_layers``.

    Args:
        layer_s: compute time of one layer.
        layer_bytes: KV bytes that one layer adds.
        handshake_s: fixed cost of one transfer.
        bytes_per_s: bandwidth of the link.
    """
    gain_s = layer_s - layer_bytes / bytes_per_s
    if gain_s <= 0:
        return num_layers  # the link is slower than compute: fewer, larger transfers waste the fewest handshakes
    for group in range(1, num_layers):
        if handshake_s <= group * gain_s:
            return group
    return num_layers


@dataclass(slots=True, kw_only=True)
class GroupSizer:
    """Keeps the group size right from measured times (exponential averages).

    Until both a step and a transfer were measured, the whole model is one group.
    """

    num_layers: int
    fixed: int | None = None
    smoothing: float = 0.2
    layer_s: float = 0.0
    layer_bytes: float = 0.0
    bytes_per_s: float = 0.0
    handshake_s: float = 0.0

    def group_size(self) -> int:
        if self.fixed is not None:
            return min(self.fixed, self.num_layers)
        if not self.layer_s or not self.bytes_per_s:
            return self.num_layers
        return smallest_hidden_group(
            self.num_layers, self.layer_s, self.layer_bytes, self.handshake_s, self.bytes_per_s
        )

    def observe_compute(self, step_s: float, step_bytes: float) -> None:
        """A prefill step took ``step_s`` and produced ``step_bytes`` of KV to send, over all layers."""
        self.layer_s = self._average(self.layer_s, step_s / self.num_layers)
        self.layer_bytes = self._average(self.layer_bytes, step_bytes / self.num_layers)

    def observe_transfer(self, nbytes: int, seconds: float, handshake_s: float) -> None:
        """``nbytes`` were copied in ``seconds`` after ``handshake_s`` of waiting for the copy to begin."""
        self.bytes_per_s = self._average(self.bytes_per_s, nbytes / max(seconds, 1e-9))
        self.handshake_s = self._average(self.handshake_s, handshake_s)

    def _average(self, old: float, new: float) -> float:
        return new if old == 0.0 else old + self.smoothing * (new - old)
