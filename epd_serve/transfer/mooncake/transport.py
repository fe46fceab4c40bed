"""The transport over Mooncake's Transfer Engine: TCP, RDMA, NVLink, Ascend."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from epd_serve.protocol.wire import Region
from epd_serve.recent import Recent
from epd_serve.transfer.mooncake.engine import Engine, MooncakeOptions, StagingPool, address_of
from epd_serve.transfer.shared_memory import SharedSlab
from epd_serve.transfer.tcp import TcpPeers, TcpServer
from epd_serve.transfer.transport import (
    DeviceBytes,
    DeviceSlab,
    Piece,
    Slab,
    StillCopying,
    TransferError,
    check_bounds,
)

#: A slab's name, size and address in host memory, which tell its process from a later one at the same address.
_IDENTITY_BYTES = 64
#: Limits of one engine call: it refuses more pieces, and would time out on more bytes.
_MAX_PIECES = 512
_MAX_BYTES = 64 * 1024**2
_MAX_STAGED_BYTES = 8 * 1024**2


class MooncakeSlab:
    """A registered slab; see :class:`epd_serve.transfer.transport.Slab`.

    Args:
        stands_for: registered device memory that the region describes instead of the slab.
    """

    def __init__(
        self, name: str, nbytes: int, engine: Engine, port: int, stands_for: DeviceBytes | None = None
    ) -> None:
        options = engine.options
        identity_at = -(-nbytes // 64) * 64
        size = -(-(identity_at + _IDENTITY_BYTES) // options.alignment_bytes) * options.alignment_bytes
        self._slab = SharedSlab(name, size, host=options.host, port=port, alignment=options.alignment_bytes)
        self._engine = engine
        self.address = address_of(self._slab.buffer)
        self.size = size
        try:
            engine.register(self.address, size)
        except TransferError:
            self._slab.close()
            raise
        self.buffer = self._slab.buffer[:nbytes]
        self.region = msgspec.structs.replace(
            self._slab.region,
            nbytes=nbytes if stands_for is None else stands_for.nbytes,
            protocol=options.protocol,
            engine_port=engine.port,
            address=self.address if stands_for is None else stands_for.address,
            device="" if stands_for is None else options.device,
            identity_address=self.address + identity_at,
        )
        self._slab.buffer[identity_at : identity_at + _IDENTITY_BYTES] = _identity(self.region)

    def close(self) -> None:
        self._engine.unregister(self.address)
        self._slab.close()


class MooncakeDeviceSlab:
    """Registered device memory owned by the caller, with its identity in host memory."""

    def __init__(self, name: str, memory: DeviceBytes, engine: Engine, port: int) -> None:
        alignment, self._engine, self.buffer = engine.options.alignment_bytes, engine, memory
        assert memory.address % alignment == 0, f"device memory is not aligned to {alignment} bytes"
        self.address, self.size = memory.address, -(-memory.nbytes // alignment) * alignment
        self._name = MooncakeSlab(name, 0, engine, port, stands_for=memory)
        self.region = self._name.region
        try:
            engine.register(self.address, self.size)
        except TransferError:
            self._name.close()
            raise

    def close(self) -> None:
        self._engine.unregister(self.address)
        self._name.close()


class MooncakeTransport:
    """One engine, one registered region for each slab, and a staging pool for unregistered bytes.

    The engine waits a minute for the first answer of a hung process and blocks all other transfers. So a new peer
    must first answer on a TCP connection of ours, which also proves the cluster key; Mooncake lacks
    authentication.

    Raises ValueError if mooncake is missing or cannot start.
    """

    def __init__(self, options: MooncakeOptions, key: str | None = None) -> None:
        self.engine = Engine(options)
        self._options = options
        self._lock = threading.Lock()
        self._slabs: list[MooncakeSlab | MooncakeDeviceSlab] = []
        self._staging = StagingPool(options.staging_bytes, max(options.alignment_bytes, 64))
        self.engine.register(self._staging.address, self._staging.nbytes)
        self._server = TcpServer(options.host, options.timeout_s, advertise=options.host, key=key)
        self._acquainted = TcpPeers(options.timeout_s, key)
        self._known: Recent[str] = Recent()
        self._closed = False

    def allocate(self, name: str, nbytes: int) -> MooncakeSlab:
        slab = MooncakeSlab(name, nbytes, self.engine, self._server.port)
        self._offer(slab)
        return slab

    def register(self, name: str, memory: DeviceBytes) -> MooncakeDeviceSlab | None:
        if not self.engine.reaches_device:
            return None
        slab = MooncakeDeviceSlab(name, memory, self.engine, self._server.port)
        self._offer(slab)
        return slab

    def _offer(self, slab: MooncakeSlab | MooncakeDeviceSlab) -> None:
        """Let new peers read the region's identity over TCP."""
        with self._lock:
            self._slabs.append(slab)
        self._server.offer(slab.region.name, memoryview(bytearray(_identity(slab.region))))

    def release(self, slab: Slab | DeviceSlab) -> None:
        self._server.withdraw(slab.region.name)
        with self._lock:
            released = [own for own in self._slabs if own.region.name == slab.region.name]
            self._slabs = [own for own in self._slabs if own not in released]
        for own in released:
            own.close()

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        peer = self._peer(region, pieces)
        batch, nbytes = list[tuple[int, int, int]](), 0
        for offset, data in pieces:
            there = region.address + offset
            if (here := self._registered_at(data)) is None:
                assert isinstance(data, memoryview), "device memory must be registered"
                self._read_staged(peer, there, data)
                continue
            for start in range(0, data.nbytes, _MAX_BYTES):
                count = min(_MAX_BYTES, data.nbytes - start)
                if len(batch) == _MAX_PIECES or nbytes + count > _MAX_BYTES:
                    self._copy(peer, batch)
                    batch, nbytes = [], 0
                batch.append((here + start, there + start, count))
                nbytes += count
        if batch:
            self._copy(peer, batch)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._server.close()
            self._acquainted.close()
            for slab in self._slabs:
                slab.close()
            self._slabs.clear()
        self.engine.unregister(self._staging.address)
        self._staging.close()
        self.engine.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the staging pool of an idle transport is full again."""
        self._staging.check_integrity()
        assert self._staging.num_taken == 0, f"{self._staging.num_taken} parts of the staging pool are missing"

    # ------------------------------------------------------------------ inside

    def _registered_at(self, data: memoryview | DeviceBytes) -> int | None:
        """Return the address of bytes in registered memory, or None if they must be staged."""
        if isinstance(data, DeviceBytes):
            address = data.address
        elif data.readonly or not data.nbytes:
            return None
        else:
            address = address_of(data)
        with self._lock:
            is_registered = any(
                slab.address <= address and address + data.nbytes <= slab.address + slab.size
                for slab in self._slabs
            )
        return address if is_registered else None

    def _peer(self, region: Region, pieces: Sequence[Piece]) -> str:
        """Return the engine address of the region's process after checking that the process is still the same."""
        check_bounds(region, pieces)
        if self._closed:
            raise TransferError("the transport is closed")
        if region.protocol != self._options.protocol:
            offered = f"mooncake's {region.protocol}" if region.protocol else "the embedded transport"
            raise TransferError(
                f"region {region.name} is offered over {offered}, and this instance uses mooncake's "
                f"{self._options.protocol}; instances need the same kv_transfer.transport and mooncake.protocol"
            )
        with self._lock:
            is_known = region.name in self._known
        if not is_known:
            identity = msgspec.structs.replace(region, nbytes=_IDENTITY_BYTES)
            self._acquainted.read(identity, [(0, memoryview(bytearray(_IDENTITY_BYTES)))])
            with self._lock:
                self._known.add(region.name)
        peer = f"{region.host}:{region.engine_port}"
        there = bytearray(_IDENTITY_BYTES)
        self._read_staged(peer, region.identity_address, memoryview(there))
        if there != _identity(region):
            raise TransferError(f"region {region.name} is gone: another process now runs at {peer}")
        return peer

    def _read_staged(self, peer: str, there: int, data: memoryview) -> None:
        """Read into unregistered memory."""
        most = min(_MAX_STAGED_BYTES, self._staging.nbytes)
        for start in range(0, data.nbytes, most):
            part = data[start : start + most]
            with self._staging.take(part.nbytes, self._options.timeout_s) as staged:
                self._copy(peer, [(staged.address, there + start, part.nbytes)])
                part[:] = staged.memory

    def _copy(self, peer: str, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy a peer's memory in one engine call: (address here, address there, bytes)."""
        started, limit_s = time.monotonic(), self.engine.call_limit_s
        if not self.engine.read(peer, *map(list, zip(*copies, strict=True))):
            if time.monotonic() - started >= limit_s:  # the engine stopped waiting but may still copy
                raise StillCopying(f"transfer with {peer} did not finish in {limit_s:g} s")
            raise TransferError(f"transfer with {peer} failed: the peer has died or refuses")


def _identity(region: Region) -> bytes:
    """Return the unique end of a region's name, its size and its address."""
    return f"{region.name[-32:]}{region.nbytes:016x}{region.address:016x}".encode()
