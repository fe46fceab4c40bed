"""The transport that needs nothing installed: shared memory on one host, TCP between hosts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, cast

from epd_serve.protocol.wire import Region
from epd_serve.transfer.shared_memory import SharedMemoryPeers, SharedSlab, host_id
from epd_serve.transfer.tcp import TcpPeers, TcpServer
from epd_serve.transfer.transport import (
    DeviceBytes,
    DeviceSlab,
    HostPiece,
    Piece,
    Slab,
    TransferError,
)

Path = Literal["auto", "shm", "tcp"]


class EmbeddedTransport:
    """Chooses by region: mapped memory where the peer runs on this host, TCP where it does not.

    Args:
        host: address on which regions are offered to other hosts; port: that of TCP, 0 chooses one.
        advertise: address under which other hosts reach it; None: ``host``.
        path: "shm" offers no TCP; "tcp" uses TCP even on one host; "auto" has both.
        timeout_s: seconds for which a TCP peer may accept nothing, or pause in the middle of a message.
        key: the cluster's, which both ends of each TCP connection prove; None: neither does.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        path: Path = "auto",
        timeout_s: float = 30.0,
        *,
        port: int = 0,
        advertise: str | None = None,
        key: str | None = None,
    ) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._slabs: dict[str, SharedSlab] = {}
        self._server = None
        if path != "shm":
            self._server = TcpServer(host, self._find, timeout_s, port=port, advertise=advertise, key=key)
        self._shared = SharedMemoryPeers()
        self._tcp = TcpPeers(timeout_s, key)

    def allocate(self, name: str, nbytes: int) -> SharedSlab:
        if self._server is None:
            slab = SharedSlab(name, nbytes)
        else:
            slab = SharedSlab(name, nbytes, host=self._server.host, port=self._server.port)
        with self._lock:
            self._slabs[slab.region.name] = slab
        return slab

    def register(self, name: str, memory: DeviceBytes) -> None:
        """A device's memory is neither mapped by the host nor sent by a socket: all pieces lie on the host."""

    def release(self, slab: Slab | DeviceSlab) -> None:
        with self._lock:
            released = self._slabs.pop(slab.region.name, None)
        if released is not None:
            released.close()

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        self._peers(region).read(region, cast(Sequence[HostPiece], pieces))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._tcp.close()
        self._shared.close()
        with self._lock:
            for slab in self._slabs.values():
                slab.close()
            self._slabs.clear()

    def _peers(self, region: Region) -> SharedMemoryPeers | TcpPeers:
        same_host = region.host_id == host_id()
        if region.protocol and not same_host:
            raise TransferError(
                f"region {region.name} is offered over mooncake; instances need the same kv_transfer.transport"
            )
        if same_host and (region.protocol or self._path != "tcp" or region.port == 0):
            return self._shared
        return self._tcp

    def _find(self, name: str) -> memoryview | None:
        with self._lock:
            slab = self._slabs.get(name)
            return None if slab is None else slab.buffer
