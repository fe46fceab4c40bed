"""KV group size: how many layers to send together so that compute hides the transfer (EPD-Serve section 3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def smallest_hidden_group(
    num_layers: int, layer_s: float, layer_bytes: float, handshake_s: float, bytes_per_s: float
) -> int:
    """Return the smallest g with ``handshake + g·bytes/bandwidth <= g·layer``, or else the g that finishes first.

    Args:
        layer_s: compute time of one layer.
        layer_bytes: KV bytes that one layer adds.
        handshake_s: fixed cost of one transfer.
        bytes_per_s: bandwidth of the link.
    """
    gain_s = layer_s - layer_bytes / bytes_per_s
    if gain_s > 0 and handshake_s <= num_layers * gain_s:
        return min(max(math.ceil(handshake_s / gain_s), 1), num_layers)
    send_s = layer_bytes / bytes_per_s
    return min(
        range(num_layers, 0, -1),  # ties go to the size with fewer writes
        key=lambda group: seconds_until_sent(num_layers, group, layer_s, send_s, handshake_s),
    )


def seconds_until_sent(
    num_layers: int, group: int, layer_s: float, send_s: float, handshake_s: float, *, free_s: float = 0.0
) -> float:
    """Return the seconds from the start of the first layer until the last group (:func:`group_ends`) is sent.

    Groups already computed when the link becomes free are sent as one write, as
    :class:`~epd_serve.transfer.kv_sender.KVSender` does.

    Args:
        send_s: seconds to send one layer, without the handshake.
        free_s: when the link has finished other transfers.
    """
    now, sent = free_s, 0
    while sent < num_layers:
        end = sent + (group if sent else (num_layers - 1) % group + 1)
        now = max(now, end * layer_s)
        while end < num_layers and (end + group) * layer_s <= now:
            end += group
        now += handshake_s + (end - sent) * send_s
        sent = end
    return now


def group_ends(num_layers: int, group_size: int) -> frozenset[int]:
    """Return the last layers of the groups.

    The first group takes the remainder, so after the last layer only one handshake and one group are left to send.
    """
    return frozenset(range(num_layers - 1, -1, -group_size))


@dataclass(slots=True, kw_only=True)
class TimeEstimate:
    """Fit of ``seconds = base + amount · slope`` to measured times, with exponential decay.

    While all amounts are similar, the base keeps its value.

    Attributes:
        memory: decay of older measurements with each new one.
        outlier: clip a measurement to this factor above or below the expected time.
    """

    memory: float = 0.9
    outlier: float = math.inf
    base_s: float = 0.0
    slope_s: float = 0.0
    is_known: bool = False
    _weight: float = 0.0
    _amount: float = 0.0
    _seconds: float = 0.0
    _amount_squared: float = 0.0
    _product: float = 0.0

    def observe(self, amount: int, seconds: float) -> None:
        """Add one measurement; with an amount of 0 it measures the base alone."""
        if self.outlier < math.inf and self._weight > 2:
            expected = self.base_s + self.slope_s * amount
            seconds = min(max(seconds, expected / self.outlier), expected * self.outlier)
        self._weight = self.memory * self._weight + 1
        self._amount = self.memory * self._amount + amount
        self._seconds = self.memory * self._seconds + seconds
        self._amount_squared = self.memory * self._amount_squared + amount * amount
        self._product = self.memory * self._product + amount * seconds
        mean, mean_s = self._amount / self._weight, self._seconds / self._weight
        if not mean:
            self.base_s = mean_s
            return
        variance = self._amount_squared / self._weight - mean**2
        slope_s = 0.0
        if variance > (0.05 * mean) ** 2:
            slope_s = (self._product / self._weight - mean * mean_s) / variance
        if slope_s > 0:
            self.base_s = max(mean_s - slope_s * mean, 0.0)
        else:  # after a link became faster, an outdated base must not take up the whole time
            self.base_s = min(self.base_s, 0.99 * mean_s)
        self.slope_s, self.is_known = max((mean_s - self.base_s) / mean, 1e-15), True


@dataclass(slots=True, kw_only=True)
class GroupSizer:
    """Chooses group sizes by link from measured times.

    Before the first measurements, a group is a quarter of the model.

    Attributes:
        fixed: a configured group size.
        layer: compute seconds of one layer by tokens in the step.
        links: seconds of a transfer by bytes, for each link.
    """

    num_layers: int
    fixed: int | None = None
    layer: TimeEstimate = field(default_factory=TimeEstimate)
    links: dict[str, TimeEstimate] = field(default_factory=dict)

    def group_size(self, link: str, num_tokens: int, layer_bytes: float) -> int:
        """Return the layers to send together in a step of ``num_tokens`` with ``layer_bytes`` of KV a layer."""
        layer, estimate = self.layer, self.links.get(link)
        if self.fixed is not None:
            return min(self.fixed, self.num_layers)
        if not layer.is_known or estimate is None or not estimate.is_known:
            return -(-self.num_layers // 4)
        layer_s = layer.base_s + layer.slope_s * num_tokens
        return smallest_hidden_group(self.num_layers, layer_s, layer_bytes, estimate.base_s, 1 / estimate.slope_s)

    def is_mostly_handshake(self, link: str, nbytes: int) -> bool:
        """Return whether sending ``nbytes`` takes no longer than the handshake; False before measurements."""
        estimate = self.links.get(link)
        return estimate is not None and estimate.is_known and estimate.slope_s * nbytes <= estimate.base_s

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """Record that all layers of a prefill step of ``num_tokens`` took ``seconds``."""
        self.layer.observe(num_tokens, seconds / self.num_layers)

    def observe_transfer(self, link: str, nbytes: int, seconds: float) -> None:
        """Record the time of one transfer over a link."""
        self.links.setdefault(link, TimeEstimate()).observe(nbytes, seconds)

    def forget(self, link: str) -> None:
        self.links.pop(link, None)

    def known_links(self) -> dict[str, tuple[float, float]]:
        """Return (handshake seconds, bytes per second) by link."""
        return {name: (link.base_s, 1 / link.slope_s) for name, link in list(self.links.items()) if link.is_known}
