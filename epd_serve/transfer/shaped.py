"""A transport with the bandwidth and latency of another link, for emulated devices and experiments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from device.emulated.timeline import Faults
from epd_serve.protocol.wire import Region
from epd_serve.transfer.transport import Piece, Transport

#: Name of the links in injected faults.
LINKS = "links"


class ShapedTransport:
    """Delays reads as if each peer process were reached over one link, on which transfers queue.

    A transfer occupies the link for its bytes, not for its latency. The inner transport moves the bytes at once;
    the call returns no earlier than over the emulated link. Errors are not delayed.

    Args:
        inner: closed with this transport.
        bytes_per_s: bandwidth of a link, or None.
        latency_s: latency of a transfer.
        scales: emulated bytes for each real one, by kind of region ("kv", "features").
        faults: injected faults, which may slow links down.
    """

    def __init__(
        self,
        inner: Transport,
        bytes_per_s: float | None,
        latency_s: float = 0.0,
        *,
        scales: Mapping[str, float] | None = None,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if (bytes_per_s is not None and bytes_per_s <= 0) or latency_s < 0:
            raise ValueError(
                f"a link needs a bandwidth above 0 and a latency of at least 0, not {bytes_per_s} and {latency_s}"
            )
        self.allocate, self.register, self.release = inner.allocate, inner.register, inner.release
        self.close = inner.close
        self._inner = inner
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._latency_s = latency_s
        self._scales, self._faults = scales or {}, faults or Faults()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at: dict[tuple[str, int], float] = {}

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        start = self._clock()
        self._inner.read(region, pieces)
        peer, slowness = (region.host_id, region.pid), self._faults.of(LINKS).slowness
        done = start + self._latency_s * slowness
        if nbytes := sum(data.nbytes for _, data in pieces):
            seconds = nbytes * self._scales.get(region.name.rpartition("-")[0], 1.0) * self._s_per_byte * slowness
            with self._lock:
                done = max(done, self._free_at.get(peer, 0.0)) + seconds
                self._free_at[peer] = done
                for other in [peer for peer, free_at in self._free_at.items() if free_at < start]:
                    del self._free_at[other]
        while (left := done - self._clock()) > 0:
            self._sleep(left)
