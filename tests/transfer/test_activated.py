"""Each call of Mooncake finds the instance's device active on its thread, as its protocol for NPUs asks.

The engine is a stand-in that copies within this process and looks at the thread that calls.
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
from epd_serve.transfer.mooncake.engine import MooncakeOptions
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


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> MooncakeOptions:
    monkeypatch.setattr(mooncake, "_load", lambda name: SimpleNamespace(TransferEngine=Engine))
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
    assert set(CALLED) == {"initialize", "register_memory", "unregister_memory", "batch_transfer_sync_read"}
