"""Instances that answer those only who have the deployment's key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import uvicorn
from servers import served

from epd_serve.backends.base import InstanceLost
from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.config.keys import CLUSTER_KEY
from epd_serve.errors import ServeError
from epd_serve.instance.http import ControlApp, Reply
from epd_serve.instance.peers import Peers
from epd_serve.protocol import wire

KEY = "0123456789abcdef-"


@contextlib.asynccontextmanager
async def guarded() -> AsyncIterator[str]:
    """URL of an instance with that key, which answers everything with what it was sent."""

    async def answer(body: bytes) -> Reply:
        return Reply(body=body)

    routes = [("GET", "/health", answer), ("GET", "/metrics", answer), ("POST", "/kv/renew", answer)]
    routes += [("POST", "/prompt/detokenize", answer)]
    app = ControlApp(routes, key=KEY)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical", http="httptools"))
    async with served(server) as url:
        yield url


async def test_without_the_key_there_are_health_and_metrics_alone():
    async with guarded() as url, aiohttp.ClientSession() as session:
        for path, headers, status in (
            ("/health", {}, 200),
            ("/metrics", {}, 200),
            ("/kv/renew", {}, 401),
            ("/nowhere", {}, 401),
            ("/kv/renew", {wire.CLUSTER_HEADER: KEY[:-1]}, 401),
            ("/kv/renew", [(wire.CLUSTER_HEADER, KEY), (wire.CLUSTER_HEADER, KEY)], 401),
            ("/kv/renew", {wire.CLUSTER_HEADER: KEY}, 200),
            ("/nowhere", {wire.CLUSTER_HEADER: KEY}, 404),
        ):
            method = "GET" if path in ("/health", "/metrics") else "POST"
            async with session.request(method, url + path, headers=headers) as response:
                assert response.status == status, (path, headers)
                assert KEY not in await response.text()


async def test_gateways_and_other_instances_send_it(monkeypatch):
    ref = wire.TransferRef("t", "r")
    async with guarded() as url:
        for key in (None, KEY):
            monkeypatch.setenv(CLUSTER_KEY, key or "")
            peers = Peers()
            try:
                async with NativeConnections(key) as connections:
                    instance = NativeInstance(connections, "p0", url)
                    if key is None:
                        for call in (
                            peers.call(url, "/kv/renew", ref),
                            instance.detokenize(ref, trace_id="t"),
                            instance.probe(60),
                        ):
                            with pytest.raises(ServeError, match="cluster_key: set EPD_SERVE_") as caught:
                                await call
                            assert caught.value.status == 500, "another instance may have the key"
                    else:
                        assert await peers.call(url, "/kv/renew", ref) == wire.encode(ref)
                        with pytest.raises(InstanceLost, match="unreadable"):  # it is an echo
                            await instance.detokenize(ref, trace_id="t")
            finally:
                await peers.close()
