"""The embedded transport: shared memory within a host, TCP between hosts."""

from __future__ import annotations

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
    """Maps regions of peers on this host; reads regions of other hosts over TCP.

    Args:
        host: address of the TCP server.
        path: "shm" starts no TCP server; "tcp" uses TCP within a host, too; "auto" has both.
        timeout_s: limit of a TCP peer's pauses within a message.
        port: port of the TCP server; 0 chooses one.
        advertise: address that peers connect to, by default ``host``.
        key: the cluster key that both ends of a TCP connection prove; None for no proof.
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
        self._slabs: dict[str, SharedSlab] = {}
        self._server = None
        if path != "shm":
            self._server = TcpServer(host, timeout_s, port=port, advertise=advertise, key=key)
        self._shared = SharedMemoryPeers()
        self._tcp = TcpPeers(timeout_s, key)

    def allocate(self, name: str, nbytes: int) -> SharedSlab:
        if self._server is None:
            slab = SharedSlab(name, nbytes)
        else:
            slab = SharedSlab(name, nbytes, host=self._server.host, port=self._server.port)
            self._server.offer(slab.region.name, slab.buffer)
        self._slabs[slab.region.name] = slab
        return slab

    def register(self, name: str, memory: DeviceBytes) -> None:
        """Return None: neither mappings nor sockets reach device memory."""

    def release(self, slab: Slab | DeviceSlab) -> None:
        if self._server is not None:
            self._server.withdraw(slab.region.name)
        if (released := self._slabs.pop(slab.region.name, None)) is not None:
            released.close()

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        same_host = region.host_id == host_id()
        if region.protocol and not same_host:
            raise TransferError(
                f"region {region.name} is offered over mooncake; instances need the same kv_transfer.transport"
            )
        is_mapped = same_host and (region.protocol or self._path != "tcp" or region.port == 0)
        peers = self._shared if is_mapped else self._tcp
        peers.read(region, cast(Sequence[HostPiece], pieces))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._tcp.close()
        self._shared.close()
        while self._slabs:
            self._slabs.popitem()[1].close()
