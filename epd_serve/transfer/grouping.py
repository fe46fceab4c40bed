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
        range(1, num_layers + 1),
        key=lambda group: seconds_until_sent(num_layers, group, layer_s, send_s, handshake_s),
    )


def seconds_until_sent(num_layers: int, group: int, layer_s: float, send_s: float, handshake_s: float) -> float:
    """Seconds from the start of the first layer until the last group is sent, in groups as of :func:`group_ends`.

    The link waits for one group at last, and the rest follows at its pace. Which one that is changes the time by
    the same for each group but the first, which may be smaller: so it is the first, the second or the last.

    Args:
        group: at most ``num_layers``.
        send_s: seconds to send one layer, without the handshake.
    """
    num_groups = -(-num_layers // group)
    first = num_layers - (num_groups - 1) * group
    if_first_s = first * layer_s + num_groups * handshake_s + num_layers * send_s
    if_last_s = num_layers * layer_s + handshake_s + group * send_s
    one_before_s = handshake_s + group * (send_s - layer_s)
    return max(if_first_s, if_last_s, if_last_s + (num_groups - 2) * one_before_s if num_groups > 2 else 0.0)


def group_ends(num_layers: int, group_size: int) -> frozenset[int]:
    """The last layer of each group. The first group is smaller where the layers do not divide evenly.

    So no group waits for an earlier one that compute did not hide: after the last layer there is one handshake and
    one group to go.
    """
    return frozenset(range(num_layers - 1, -1, -group_size))


@dataclass(slots=True, kw_only=True)
class LinkEstimate:
    """``seconds = handshake + bytes / bandwidth``, fitted to the writes over one link; older ones count less.

    Where all writes are of one size, their times cannot tell the two apart: then the handshake stays as it was.
    """

    memory: float = 0.9
    handshake_s: float = 0.0
    s_per_byte: float = 0.0
    _weight: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0
    _bytes_squared: float = 0.0
    _product: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.s_per_byte > 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from a write that took ``seconds``; a write of no bytes is all handshake."""
        self._weight = self.memory * self._weight + 1
        self._bytes = self.memory * self._bytes + nbytes
        self._seconds = self.memory * self._seconds + seconds
        self._bytes_squared = self.memory * self._bytes_squared + nbytes * nbytes
        self._product = self.memory * self._product + nbytes * seconds
        mean_bytes, mean_seconds = self._bytes / self._weight, self._seconds / self._weight
        if not mean_bytes:
            self.handshake_s = mean_seconds
            return
        variance = self._bytes_squared / self._weight - mean_bytes**2
        slope = 0.0
        if variance > (0.05 * mean_bytes) ** 2:
            slope = (self._product / self._weight - mean_bytes * mean_seconds) / variance
        if slope > 0:
            self.handshake_s = max(mean_seconds - slope * mean_bytes, 0.0)
        else:  # an old handshake must not make a link infinitely fast that has become quicker
            self.handshake_s = min(self.handshake_s, 0.99 * mean_seconds)
        self.s_per_byte = max((mean_seconds - self.handshake_s) / mean_bytes, 1e-15)


@dataclass(slots=True, kw_only=True)
class GroupSizer:
    """Keeps the group size right from measured times, for each link apart.

    Until both a step and a transfer were measured, a group is a quarter of the model.

    Attributes:
        fixed: a group size that is not to be changed.
        token_s: compute time of one token in one layer.
    """

    num_layers: int
    fixed: int | None = None
    smoothing: float = 0.2
    token_s: float = 0.0
    links: dict[str, LinkEstimate] = field(default_factory=dict)

    def group_size(self, link: str, num_tokens: int, layer_bytes: float) -> int:
        """Layers to send together in a step of ``num_tokens`` that adds ``layer_bytes`` of KV to a layer."""
        estimate = self.links.get(link)
        if self.fixed is not None:
            return min(self.fixed, self.num_layers)
        if not self.token_s or estimate is None or not estimate.is_known:
            return -(-self.num_layers // 4)
        return smallest_hidden_group(
            self.num_layers,
            self.token_s * num_tokens,
            layer_bytes,
            estimate.handshake_s,
            1 / estimate.s_per_byte,
        )

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prefill step of ``num_tokens`` that took ``seconds`` over all layers."""
        new = seconds / (self.num_layers * num_tokens)
        self.token_s = new if not self.token_s else self.token_s + self.smoothing * (new - self.token_s)

    def observe_transfer(self, link: str, nbytes: int, seconds: float) -> None:
        """Learn from one write over a link."""
        self.links.setdefault(link, LinkEstimate()).observe(nbytes, seconds)

    def forget(self, link: str) -> None:
        """Forget a link that is gone."""
        self.links.pop(link, None)

    def known_links(self) -> dict[str, tuple[float, float]]:
        """(handshake seconds, bytes per second) of each link that was used."""
        return {
            name: (link.handshake_s, 1 / link.s_per_byte)
            for name, link in list(self.links.items())
            if link.is_known
        }
