"""Each call of Mooncake finds the instance's device active on its thread, as its protocol for NPUs asks.

The engine is a stand-in that copies within this process and looks at the thread that calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
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


CALLED: set[str] = set()


class Engine:
    """Each method copies what it is to copy, on a thread with a context."""

    def get_rpc_port(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            assert getattr(THREAD, "has_context", False), f"{name} on a thread without a context"
            CALLED.add(name)
            if name == "batch_transfer_sync_read":
                for target, source, size in zip(*arguments[1:], strict=True):
                    ctypes.memmove(target, source, size)
            return 0

        return call


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
    assert {"initialize", "register_memory", "unregister_memory", "batch_transfer_sync_read"} == CALLED
