"""Wrappers of Mooncake's Transfer Engine, store client and master; the only module that imports mooncake.

The master binds its two ports to the given host. The Transfer Engine always listens on every interface, without
authentication: for a loopback host its sockets are bound to the loopback device (SO_BINDTODEVICE) before any
memory is registered; for any other host a firewall must protect its ports, 15000 to 17000.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from epd_serve.protocol.addresses import is_loopback, is_wildcard
from epd_serve.transfer.shared_memory import SharedSlab
from epd_serve.transfer.staging import CellLender
from epd_serve.transfer.transport import TransferError

_INSTALL = (
    "mooncake is not installed; run in epd-serve's clone: pip install '.[mooncake]' "
    "(without CUDA: pip install mooncake-transfer-engine-non-cuda)"
)
_LIBRARIES = "libibverbs1 librdmacm1 libnuma1 libcurl4"
_SETUP_PATIENCE_S = 15.0
_SETUP_RETRY_S = 0.2
_RPC_TIMEOUT_MS = 2000
_CONNECT_TIMEOUT_MS = 1000
#: How long to fail calls at once after the master did not answer.
_OUT_S = 2.0
_MASTER_THREADS = 4

# Result codes of the store.
_OK = 0
_NO_ROOM = -200
_NOT_FOUND = -704
_UNREACHABLE = range(-902, -899)


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeOptions:
    """Options of this process's Transfer Engine and store client.

    Attributes:
        host: address that peers connect to.
        protocol: the Transfer Engine's protocol: tcp, rdma, ascend.
        devices: RDMA devices to use, separated by commas; "" for all.
        staging_bytes: registered memory that stages unregistered bytes.
        timeout_s: limit of a transfer without progress, fixed by the first engine of a process.
        alignment_bytes, max_regions: limits of registered memory (device.transport.TransportCapability).
        device: type of the instance's device if the protocol reaches its memory; else "".
        activate: sets the calling thread's device before each call, which the ascend protocol needs
            (ascend_direct_transport.md, "Device Setup Required").
    """

    host: str
    protocol: str
    devices: str = ""
    staging_bytes: int = 256 * 1024**2
    timeout_s: float = 30.0
    alignment_bytes: int = 1
    max_regions: int | None = None
    device: str = ""
    activate: Callable[[], None] = lambda: None


def check_installed() -> None:
    """Raise ValueError with the install command if mooncake is missing, without importing it."""
    if importlib.util.find_spec("mooncake") is None:
        raise ValueError(_INSTALL)


def master_command(host: str, port: int, http_port: int) -> tuple[str, ...]:
    """Return the command line of a store's master, which answers ``GET /health`` at ``http_port`` when ready."""
    check_installed()
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return (
                str(program),
                f"--rpc_address={host}",
                f"--rpc_port={port}",
                f"--metrics_host={host}",
                f"--metrics_port={http_port}",
                f"--rpc_thread_num={_MASTER_THREADS}",
                "--logtostderr",
                "--minloglevel=1",
            )
    raise ValueError("the installed mooncake lacks mooncake_master")


class Engine:
    """A Transfer Engine. All calls block and are safe from any thread; failures are TransferErrors."""

    def __init__(self, options: MooncakeOptions) -> None:
        if is_wildcard(options.host):
            raise ValueError(
                f"mooncake cannot offer memory at {options.host}; "
                "set instances.host to an address that the other instances can reach"
            )
        _configure(options.timeout_s)
        self.options = options
        self.call_limit_s = int(os.environ["MC_TRANSFER_TIMEOUT"])
        self._num_regions = 0
        before = _wildcard_listeners()
        options.activate()
        self._engine: Any = _load("mooncake.engine").TransferEngine()
        if self._engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.devices) != _OK:
            raise ValueError(
                f"mooncake's transfer engine cannot start with protocol {options.protocol} on {options.host}"
            )
        _confine(options.host, before)
        self.port: int = self._engine.get_rpc_port()

    @property
    def shared(self) -> Any:
        """The handle by which a store client uses this engine."""
        return self._engine.get_engine()

    @property
    def reaches_device(self) -> bool:
        """True if memory of the instance's device can be registered.

        A Mooncake wheel without CUDA lists no GPUs and would take their addresses for host memory. For a GPU
        without a network card near it, the engine has fallen back to TCP.
        """
        device = self.options.device
        if device != "cuda":
            return bool(device)
        cards: dict[str, list[list[str]]] = json.loads(self._engine.get_local_topology())
        return any(any(near) for name, near in cards.items() if name.startswith("cuda:"))

    def register(self, address: int, nbytes: int) -> None:
        limit = self.options.max_regions
        if limit is not None and self._num_regions >= limit:
            raise TransferError(f"{self.options.protocol} registers at most {limit} regions")
        self.options.activate()
        if self._engine.register_memory(address, nbytes) != _OK:
            raise TransferError(f"mooncake cannot register {nbytes} bytes for {self.options.protocol}")
        self._num_regions += 1

    def unregister(self, address: int) -> None:
        self.options.activate()
        self._engine.unregister_memory(address)
        self._num_regions -= 1

    def read(self, peer: str, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> bool:
        """Copy ``peer``'s registered memory here by busy polling; return whether this succeeded."""
        engine = self._engine  # held, as another thread may close
        if engine is None:
            raise TransferError("the transport is closed")
        self.options.activate()
        result: int = engine.batch_transfer_sync_read(peer, targets, sources, sizes)
        return result == _OK

    def close(self) -> None:
        """Stop listening once no call is under way; all memory must be unregistered."""
        self.options.activate()
        self._engine = None


class StoreUnreachable(Exception):
    """The store's master does not answer, or did not within the last two seconds."""


class StoreClient:
    """A client of Mooncake Store. All calls block and are safe from any thread.

    Every call raises StoreUnreachable when the master does not answer, and at once for the next two seconds.

    Args:
        master: address, ``host:port``.
        segment_bytes: memory that this process lends to the store; 0 for a reader.
        engine: shared with a transport of this process; None creates one.
    """

    def __init__(
        self, options: MooncakeOptions, master: str, segment_bytes: int, *, engine: Engine | None = None
    ) -> None:
        _configure(options.timeout_s)
        store = _load("mooncake.store")
        before = _wildcard_listeners()
        self.has_segment = segment_bytes > 0
        self._clock = time.monotonic
        self._out_until = -math.inf
        self._activate = options.activate
        self._activate()
        self._client: Any = store.MooncakeDistributedStore()
        names = (options.protocol, options.devices, master)
        shared = {} if engine is None else {"engine": engine.shared}
        deadline = self._clock() + _SETUP_PATIENCE_S
        while self._client.setup(options.host, "P2PHANDSHAKE", segment_bytes, 0, *names, **shared) != _OK:
            if self._clock() >= deadline:
                raise ValueError(f"the mooncake_master at {master} does not answer or refuses {options.protocol}")
            time.sleep(_SETUP_RETRY_S)
        _confine(options.host, before)
        self._placement = store.ReplicateConfig()
        self._placement.preferred_segment = self._client.get_hostname()

    def register(self, address: int, nbytes: int) -> None:
        """Register memory for :meth:`put` and :meth:`get`."""
        self._activate()
        if self._client.register_buffer(address, nbytes) != _OK:
            raise TransferError(f"mooncake cannot register {nbytes} bytes")

    def put(self, key: str, address: int, nbytes: int) -> bool:
        """Store a new object; return False if the store is full. Raises TransferError."""
        result = self._call(self._client.put_from, key, address, nbytes, self._placement)
        if result not in (_OK, _NO_ROOM):
            raise TransferError(f"mooncake cannot store {key[:12]}: error {result}")
        return result == _OK

    def size(self, key: str) -> int | None:
        """Return the size of an object, or None if there is none; leases it for some seconds."""
        if self._call(self._client.is_exist, key) != 1:
            return None
        result = self._call(self._client.get_size, key)
        return result if result >= 0 else None

    def get(self, key: str, address: int, nbytes: int) -> None:
        """Copy an object of ``nbytes`` into memory. Raises TransferError if it is gone or differs in size."""
        result = self._call(self._client.get_into, key, address, nbytes)
        if result != nbytes:
            raise TransferError(f"cannot get object {key[:12]}: {_meaning(result)}")

    def get_range(self, key: str, address: int, offset: int, nbytes: int) -> None:
        """Copy a part of an object into memory. Raises TransferError."""

        def read() -> int:
            (((result,),),) = self._client.get_into_ranges([address], [[key]], [[[0]]], [[[offset]]], [[[nbytes]]])
            return int(result)

        result = self._call(read)
        if result != nbytes:
            raise TransferError(f"cannot read object {key[:12]}: {_meaning(result)}")

    def remove(self, key: str) -> bool:
        """Remove an object even if it is leased; return whether it is gone."""
        return self._call(self._client.remove, key, True) in (_OK, _NOT_FOUND)

    def close(self) -> None:
        """Withdraw this process's segment with all objects in it. Idempotent."""
        if self._client is not None:
            self._activate()
            self._client.close()
            self._client = None

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        if self._clock() < self._out_until:
            raise StoreUnreachable("mooncake_master recently did not answer")
        self._activate()
        result = int(function(*arguments))
        if result in _UNREACHABLE:
            self._out_until = self._clock() + _OUT_S
            raise StoreUnreachable("mooncake_master does not answer")
        return result


def _meaning(result: int) -> str:
    if result >= 0:
        return f"its size is {result} bytes"
    return {_NOT_FOUND: "it does not exist"}.get(result, f"error {result}")


def _configure(timeout_s: float) -> None:
    """Set the environment variables that Mooncake reads once, except those set by the user.

    The engine itself must end a transfer without progress: one that only times out continues in the background and
    writes memory when the peer wakes up.
    """
    seconds = max(1, math.ceil(timeout_s))
    settings = {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_SLICE_TIMEOUT": seconds,
        "MC_TRANSFER_TIMEOUT": max(5, 2 * seconds),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": min(5, seconds),
        "MC_RPC_TIMEOUT_MS": _RPC_TIMEOUT_MS,
        "MC_RPC_CONNECT_TIMEOUT_MS": _CONNECT_TIMEOUT_MS,
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
        "ASCEND_CONNECT_TIMEOUT": 1000 * min(5, seconds),  # ms
        "ASCEND_TRANSFER_TIMEOUT": 1000 * seconds,  # ms
    }
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


def _load(name: str) -> Any:
    check_installed()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"mooncake is installed but cannot be imported: {error}. On Debian it needs {_LIBRARIES}"
        ) from error


def _wildcard_listeners() -> set[tuple[int, int]]:
    """Return this process's TCP sockets that listen on every interface: (descriptor, port)."""
    every = psutil.Process().net_connections("tcp")
    return {(one.fd, one.laddr.port) for one in every if one.status == "LISTEN" and is_wildcard(one.laddr.ip)}


def _confine(host: str, before: set[tuple[int, int]]) -> None:
    """For a loopback ``host``, bind the listeners created since ``before`` to the loopback device."""
    if not is_loopback(host):
        return
    for descriptor, _ in _wildcard_listeners() - before:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def address_of(memory: memoryview) -> int:
    """Return the address of writable, contiguous, non-empty memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True, slots=True)
class Staged:
    """A part of the pool."""

    address: int
    memory: memoryview


class StagingPool:
    """A bounded pool of registered memory. Safe from any thread."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self.nbytes = -(-nbytes // alignment) * alignment
        self._slab = SharedSlab("staging", self.nbytes, alignment=alignment)
        self._bytes = CellLender(0, self.nbytes, math.inf, alignment=64)
        self.address = address_of(self._slab.buffer)
        self.close = self._slab.close
        self.check_integrity = self._bytes.check_integrity

    @property
    def num_taken(self) -> int:
        """Parts in use or lost."""
        return self._bytes.num_lent

    @contextmanager
    def take(self, nbytes: int, timeout_s: float) -> Iterator[Staged]:
        """Wait for ``nbytes``; they are lost if StillCopying ends the context.

        Raises TransferError after ``timeout_s``, or for more bytes than the pool has.
        """
        if nbytes > self.nbytes:
            raise TransferError(f"{nbytes} bytes do not fit a staging pool of {self.nbytes}")
        with self._bytes.lend(nbytes, timeout_s) as start:
            yield Staged(self.address + start, self._slab.buffer[start : start + nbytes])
