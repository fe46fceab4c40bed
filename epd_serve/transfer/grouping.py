"""The number of layers to send at once so that the transfer hides behind compute (EPD-Serve section 3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def smallest_hidden_group(
    num_layers: int, layer_s: float, layer_bytes: float, handshake_s: float, bytes_per_s: float
) -> int:
    """The smallest g with ``handshake + g·bytes/bandwidth <= g·layer``, or else the one that is over the soonest.

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
        range(num_layers, 0, -1),  # of equals the one of fewer writes
        key=lambda group: seconds_until_sent(num_layers, group, layer_s, send_s, handshake_s),
    )


def seconds_until_sent(
    num_layers: int, group: int, layer_s: float, send_s: float, handshake_s: float, *, free_s: float = 0.0
) -> float:
    """Seconds from the start of the first layer until the last group is sent, in groups as of :func:`group_ends`.

    Groups that are computed when the link gets to them go as one write, as of
    :class:`~epd_serve.transfer.kv_sender.KVSender`.

    Args:
        send_s: seconds to send one layer, without the handshake.
        free_s: when the link has sent what is of others.
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
    """The last layer of each group. The first group is smaller where the layers do not divide evenly.

    So no group waits for an earlier one that compute did not hide: after the last layer there is one handshake and
    one group to go.
    """
    return frozenset(range(num_layers - 1, -1, -group_size))


@dataclass(slots=True, kw_only=True)
class TimeEstimate:
    """``seconds = base + amount · slope``, fitted to measured times; older ones count less.

    Where all amounts are alike, their times cannot tell the two apart: then the base stays as it was.

    Attributes:
        memory: the weight of what was measured before, at each new time.
        outlier: a time counts as so many times longer or shorter than expected at most.
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
        """Learn from one time; where the amount is none, it is all base."""
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
        else:  # an old handshake must not make a link infinitely fast that has become quicker
            self.base_s = min(self.base_s, 0.99 * mean_s)
        self.slope_s, self.is_known = max((mean_s - self.base_s) / mean, 1e-15), True


@dataclass(slots=True, kw_only=True)
class GroupSizer:
    """Keeps the group size right from measured times, for each link apart.

    Until both a step and a transfer were measured, a group is a quarter of the model.

    Attributes:
        fixed: a group size that is not to be changed.
        layer: seconds that one layer takes to compute, over the tokens of the step.
        links: seconds of a write, over its bytes.
    """

    num_layers: int
    fixed: int | None = None
    layer: TimeEstimate = field(default_factory=TimeEstimate)
    links: dict[str, TimeEstimate] = field(default_factory=dict)

    def group_size(self, link: str, num_tokens: int, layer_bytes: float) -> int:
        """Layers to send together in a step of ``num_tokens`` that adds ``layer_bytes`` of KV to a layer."""
        layer, estimate = self.layer, self.links.get(link)
        if self.fixed is not None:
            return min(self.fixed, self.num_layers)
        if not layer.is_known or estimate is None or not estimate.is_known:
            return -(-self.num_layers // 4)
        layer_s = layer.base_s + layer.slope_s * num_tokens
        return smallest_hidden_group(self.num_layers, layer_s, layer_bytes, estimate.base_s, 1 / estimate.slope_s)

    def is_mostly_handshake(self, link: str, nbytes: int) -> bool:
        """Whether a write's bytes take the link no longer than the handshake does; False where none is known."""
        estimate = self.links.get(link)
        return estimate is not None and estimate.is_known and estimate.slope_s * nbytes <= estimate.base_s

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prefill step of ``num_tokens`` that took ``seconds`` over all layers."""
        self.layer.observe(num_tokens, seconds / self.num_layers)

    def observe_transfer(self, link: str, nbytes: int, seconds: float) -> None:
        """Learn from one write over a link."""
        self.links.setdefault(link, TimeEstimate()).observe(nbytes, seconds)

    def forget(self, link: str) -> None:
        """Forget a link that is gone."""
        self.links.pop(link, None)

    def known_links(self) -> dict[str, tuple[float, float]]:
        """(handshake seconds, bytes per second) of each link that was used."""
        return {name: (link.base_s, 1 / link.slope_s) for name, link in list(self.links.items()) if link.is_known}
