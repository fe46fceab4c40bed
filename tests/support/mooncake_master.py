"""A mooncake_master of a test's own, which can be killed and started again in its place; a client to kill."""

from __future__ import annotations

import asyncio
import subprocess
from multiprocessing.connection import Connection

from http_client import is_up
from own_ports import free_port
from program import wait_until
from transports import make_transport, mooncake_options

from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.mooncake.engine import StoreClient, master_command
from epd_serve.transfer.mooncake.store import MooncakeFeatureStore

#: How long an object that was read cannot be removed.
LEASE_S = 1.0


class Master:
    def __init__(self) -> None:
        self._port, self._http_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = master_command("127.0.0.1", self._port, self._http_port)
        self._process = subprocess.Popen(
            [*command, f"--default_kv_lease_ttl={int(LEASE_S * 1000)}"], stderr=subprocess.DEVNULL
        )
        wait_until(lambda: is_up(f"http://127.0.0.1:{self._http_port}/health"), "mooncake_master starts")

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def put_and_wait(master: str, key: str, data: bytes, connection: Connection) -> None:
    """An encoder with one feature, until killed."""
    options = mooncake_options(staging_bytes=1 << 20)
    local = EmbeddedFeatureStore(make_transport("shm"), 1 << 20)
    store = MooncakeFeatureStore(StoreClient(options, master, 1 << 24), local, options)
    asyncio.run(store.put(key, memoryview(data), [len(data)], "uint8", "r"))
    connection.send("stored")
    connection.recv()
