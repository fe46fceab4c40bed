"""The transport that needs nothing installed: shared memory on one host, TCP between hosts."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from typing import Literal, cast

from epd_serve.protocol.wire import Region
from epd_serve.transfer.shared_memory import SharedMemoryPeers, SharedSlab, host_id
from epd_serve.transfer.tcp import JoinedMemory, TcpPeers, TcpServer
from epd_serve.transfer.transport import (
    DeviceBytes,
    DeviceSlab,
    HostPiece,
    Piece,
    Slab,
    TransferError,
    WriteGate,
)

Path = Literal["auto", "shm", "tcp"]


class EmbeddedTransport:
    """Chooses by region: mapped memory where the peer runs on this host, TCP where it does not.

    Args:
        host: address on which regions are offered to other hosts; port: that of TCP, 0 chooses one.
        advertise: address under which other hosts reach it; None: ``host``.
        path: "shm" offers no TCP; "tcp" uses TCP even on one host; "auto" has both.
        timeout_s: seconds for which a TCP peer may accept nothing, or pause in the middle of a message. A write
            must not hang on beyond the lease of its target.
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
        self._offered: dict[str, JoinedMemory] = {}
        self.gate = WriteGate()
        self._server = None
        if path != "shm":
            self._server = TcpServer(
                host, self._find, self.gate, timeout_s, port=port, advertise=advertise, key=key
            )
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
        """A device's memory is neither mapped by the host nor written to a socket: all pieces lie on the host."""

    def release(self, slab: Slab | DeviceSlab) -> None:
        with self._lock:
            released = self._slabs.pop(slab.region.name, None)
        if released is not None:
            released.close()

    def offer(self, name: str, buffers: Sequence[memoryview]) -> Region:
        """Memory of this process that another library has made, for peers to read and write over TCP: its parts
        as if they lay one after the other. A piece of a write or read must lie in one of them.

        It must outlive this transport. Raises ValueError where the transport offers no TCP.
        """
        if self._server is None:
            raise ValueError("memory of others is offered over TCP, which path='shm' leaves out")
        unique, memory = f"{name}-{uuid.uuid4().hex}", JoinedMemory(buffers)
        with self._lock:
            self._offered[unique] = memory
        return Region(
            name=unique,
            nbytes=memory.nbytes,
            host_id="",
            pid=os.getpid(),
            fd=-1,
            host=self._server.host,
            port=self._server.port,
        )

    def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
        self._peers(region).write(region, cast(Sequence[HostPiece], pieces), transfer_ids)

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
            self._offered.clear()

    def _peers(self, region: Region) -> SharedMemoryPeers | TcpPeers:
        same_host = region.host_id == host_id()
        if region.protocol and not same_host:
            raise TransferError(
                f"region {region.name} is offered over mooncake; instances need the same kv_transfer.transport"
            )
        if same_host and (region.protocol or self._path != "tcp" or region.port == 0):
            return self._shared
        return self._tcp

    def _find(self, name: str) -> memoryview | JoinedMemory | None:
        with self._lock:
            slab = self._slabs.get(name)
            return self._offered.get(name) if slab is None else slab.buffer
