"""A transport with the bandwidth and latency of another link, for emulated devices and experiments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from device.emulated.timeline import Faults
from epd_serve.cost.profile import Profile
from epd_serve.protocol.wire import Region
from epd_serve.transfer.transport import DeviceBytes, DeviceSlab, Piece, Slab, Transport


class ShapedTransport:
    """Delays reads as if each peer process were reached over one link, on which transfers queue.

    A transfer occupies the link for its bytes, not for its latency. The inner transport moves the bytes at once;
    the call returns when the emulated link would have, if that is later. Errors are not delayed.

    Args:
        inner: closed with this transport.
        bytes_per_s: bandwidth of each link; None for no limit.
        latency_s: latency of each transfer.
        bytes_of: bytes to charge for a transfer, given the region and its real bytes.
        slowness: factor on the time of transfers that begin now.
    """

    def __init__(
        self,
        inner: Transport,
        bytes_per_s: float | None,
        latency_s: float = 0.0,
        *,
        bytes_of: Callable[[Region, int], float] = lambda region, nbytes: nbytes,
        slowness: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if (bytes_per_s is not None and bytes_per_s <= 0) or latency_s < 0:
            raise ValueError(
                f"a link needs a bandwidth above 0 and a latency of at least 0, not {bytes_per_s} and {latency_s}"
            )
        self._inner = inner
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._latency_s = latency_s
        self._bytes_of, self._slowness = bytes_of, slowness
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at: dict[tuple[str, int], float] = {}

    def allocate(self, name: str, nbytes: int) -> Slab:
        return self._inner.allocate(name, nbytes)

    def register(self, name: str, memory: DeviceBytes) -> DeviceSlab | None:
        return self._inner.register(name, memory)

    def release(self, slab: Slab | DeviceSlab) -> None:
        self._inner.release(slab)

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        start = self._clock()
        self._inner.read(region, pieces)
        peer, slowness = (region.host_id, region.pid), self._slowness()
        done = start + self._latency_s * slowness
        if nbytes := self._bytes_of(region, sum(data.nbytes for _, data in pieces)):
            with self._lock:
                done = max(done, self._free_at.get(peer, 0.0)) + nbytes * self._s_per_byte * slowness
                self._free_at[peer] = done
                for other in [peer for peer, free_at in self._free_at.items() if free_at < start]:
                    del self._free_at[other]
        while (left := done - self._clock()) > 0:
            self._sleep(left)

    def close(self) -> None:
        self._inner.close()


#: Name of the links in injected faults.
LINKS = "links"


def over_emulated_links(inner: Transport, profile: Profile, scales: Mapping[str, float]) -> ShapedTransport:
    """Return ``inner`` shaped as the link of an emulated device.

    Args:
        profile: of the emulated device and model.
        scales: emulated bytes for each real one, by kind of region ("kv", "features").
    """
    faults = Faults.of_environment()
    return ShapedTransport(
        inner,
        profile.link_bytes_per_s,
        profile.handshake_s,
        bytes_of=lambda region, nbytes: nbytes * scales.get(region.name.rpartition("-")[0], 1.0),
        slowness=lambda: faults.of(LINKS).slowness,
    )
