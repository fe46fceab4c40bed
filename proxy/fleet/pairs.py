"""Pairs of instances of which one cannot reach the other, though this gateway reaches both."""

from __future__ import annotations

import asyncio
import logging

from epd_serve.routing.table import InstanceRecord

logger = logging.getLogger(__name__)

#: How long a pair is avoided at first; twice as long each time that it fails again.
_AVOID_S, _MAX_AVOID_S = 5.0, 60.0


class Pairs:
    """Has routing avoid pairs that have failed, for a while. With others, each of the two gets its share."""

    def __init__(self) -> None:
        self._avoid_s: dict[tuple[str, str], float] = {}

    def failed(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """``caller`` says that it cannot reach ``peer``, or the other way round."""
        if peer.name in caller.cut_off:
            return
        pair = caller.name, peer.name
        avoid_s = self._avoid_s.get(pair, _AVOID_S)
        self._avoid_s[pair] = min(2 * avoid_s, _MAX_AVOID_S)
        logger.warning("instances %s and %s do not reach each other; kept apart for %g s", *pair, avoid_s)
        caller.cut_off.add(peer.name)
        asyncio.get_running_loop().call_later(avoid_s, caller.cut_off.discard, peer.name)

    def worked(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """Next time it is avoided for a short while again."""
        if self._avoid_s:
            self._avoid_s.pop((caller.name, peer.name), None)
