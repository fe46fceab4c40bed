"""Each call of Mooncake finds the instance's device active on its thread, as its protocol for NPUs asks.

The engine and the store's client are stand-ins that copy within this process and look at the thread that calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from on_thread import elsewhere

from epd_serve.transfer.mooncake import engine as mooncake
from epd_serve.transfer.mooncake.engine import MooncakeOptions, StoreClient
from epd_serve.transfer.mooncake.transport import MooncakeTransport

THREAD = threading.local()


def activate() -> None:
    THREAD.has_context = True


def asks_for_context(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        assert getattr(THREAD, "has_context", False), f"{function.__name__} on a thread without a context"
        CALLED.append(function.__name__)
        return function(*args, **kwargs)

    return call


CALLED: list[str] = []


class Engine:
    @asks_for_context
    def initialize(self, *options: object) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    @asks_for_context
    def register_memory(self, address: int, nbytes: int) -> int:
        return 0

    @asks_for_context
    def unregister_memory(self, address: int) -> int:
        return 0

    @asks_for_context
    def batch_transfer_sync_read(
        self, peer: str, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> int:
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return 0


class Store:
    """A client that has nothing."""

    @asks_for_context
    def setup(self, *options: object, **engine: object) -> int:
        return 0

    def get_hostname(self) -> str:
        return "here"

    @asks_for_context
    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    @asks_for_context
    def put_from(self, *what: object) -> int:
        return 0

    @asks_for_context
    def is_exist(self, key: str) -> int:
        return 0

    @asks_for_context
    def get_into(self, key: str, address: int, nbytes: int) -> int:
        return nbytes

    @asks_for_context
    def remove(self, key: str, force: bool) -> int:
        return 0

    @asks_for_context
    def close(self) -> None: ...


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> MooncakeOptions:
    modules = {
        "mooncake.engine": SimpleNamespace(TransferEngine=Engine),
        "mooncake.store": SimpleNamespace(MooncakeDistributedStore=Store, ReplicateConfig=SimpleNamespace),
    }
    monkeypatch.setattr(mooncake, "_load", modules.__getitem__)
    CALLED.clear()
    return MooncakeOptions(
        host="127.0.0.1", protocol="ascend", staging_bytes=1 << 16, timeout_s=2.0, activate=activate
    )


def test_a_transport_activates_the_device_on_every_thread(options: MooncakeOptions) -> None:
    transport = elsewhere(MooncakeTransport, options)
    slab = elsewhere(transport.allocate, "kv", 4096)
    data, back = b"k" * 64, memoryview(bytearray(64))
    slab.buffer[128:192] = data
    elsewhere(transport.read, slab.region, [(128, back)])
    assert back == data
    elsewhere(transport.release, slab)
    elsewhere(transport.close)
    assert set(CALLED) == {
        "initialize",
        "register_memory",
        "unregister_memory",
        "batch_transfer_sync_read",
    }


def test_a_store_activates_the_device_on_every_thread(options: MooncakeOptions) -> None:
    client = elsewhere(StoreClient, options, "127.0.0.1:1", 1 << 20)
    elsewhere(client.register, 4096, 4096)
    elsewhere(client.put, "key", 4096, 8)
    assert elsewhere(client.size, "key") is None
    elsewhere(client.get, "key", 4096, 8)
    elsewhere(client.remove, "key")
    elsewhere(client.close)
    assert CALLED == ["setup", "register_buffer", "put_from", "is_exist", "get_into", "remove", "close"]
