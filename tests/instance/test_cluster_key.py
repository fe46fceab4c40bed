"""Instances and their callers prove to each other that they have the deployment's key, which never travels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import served

from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.errors import InstanceFailed, InstanceLost, InstanceUntrusted, ServeError
from epd_serve.instance.http import ControlHttp, Peers, Reply, control_server_app
from epd_serve.protocol import wire
from epd_serve.rpc.cluster import (
    CLUSTER_KEY,
    HELLO,
    ClusterLinks,
    Endpoint,
    Greeting,
    NotProved,
    address_text,
    with_link,
)
from epd_serve.rpc.http import HttpCall, HttpPool

KEY = "0123456789abcdef-"
SECRET = "what the client asked"


@contextlib.asynccontextmanager
async def guarded(key: str = KEY, own: str = "") -> AsyncIterator[str]:
    """URL of an instance with that key, which answers everything with what it was sent."""

    async def answer(body: bytes) -> Reply:
        return Reply(body=body)

    routes = [
        ("GET", "/health", answer),
        ("GET", "/health/live", answer),
        ("GET", "/metrics", answer),
        ("POST", "/kv/renew", answer),
    ]
    routes += [("POST", "/prompt/detokenize", answer)]
    app = control_server_app(routes, key, lambda: own)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical", http=ControlHttp))
    async with served(server) as url:
        yield url


class Between:
    """Passes bytes on between its callers and ``url``, if any, and keeps them; else it answers ``said``."""

    def __init__(self, url: str = "", said: bytes = b"") -> None:
        self._target = url.removeprefix("http://").split(":") if url else None
        self._said = said
        self.heard = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out = await asyncio.open_connection(*self._target) if self._target else None
        back = None if out is None else asyncio.create_task(self._copy(out[0], writer))
        try:
            while data := await reader.read(65536):
                self.heard += data
                if out is None:
                    writer.write(self._said)
                else:
                    out[1].write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            if out is not None and back is not None:
                out[1].close()
                await asyncio.gather(back, return_exceptions=True)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)


@contextlib.asynccontextmanager
async def listening(between: Between) -> AsyncIterator[str]:
    server = await asyncio.start_server(between.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def asked(url: str, key: str | None = KEY) -> bytes:
    pool = HttpPool("d0", url, key)
    try:
        return await HttpCall(pool, "POST", "/kv/renew", "", [SECRET.encode()]).ask()
    finally:
        await pool.close()


async def test_without_a_proof_there_are_health_and_metrics_alone():
    async with guarded() as url, aiohttp.ClientSession() as session:
        for path, headers, status in (
            ("/health", {}, 200),
            ("/health/live", {}, 200),
            ("/metrics", {}, 200),
            ("/kv/renew", {}, 401),
            ("/nowhere", {}, 401),
            ("/kv/renew", {"x-epd-cluster-key": KEY}, 401),
            ("/kv/renew", {"x-epd-proof": "0" * 64}, 401),
            ("/kv/renew", {"x-epd-proof": ""}, 401),
            ("/health", {"x-epd-proof": "0" * 64}, 401),
        ):
            method = "GET" if path in ("/health", "/health/live", "/metrics") else "POST"
            async with session.request(method, url + path, headers=headers) as response:
                assert response.status == status, (path, headers)
                assert KEY not in await response.text()


async def test_gateways_and_other_instances_prove_it(monkeypatch):
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
                        ):
                            with pytest.raises(ServeError, match="cluster_key: set EPD_SERVE_") as caught:
                                await call
                            assert caught.value.status == 500, "another instance may have the key"
                    else:
                        for _ in range(3):
                            assert await peers.call(url, "/kv/renew", ref) == wire.encode(ref)
                        with pytest.raises(InstanceLost, match="unreadable"):  # it is an echo
                            await instance.detokenize(ref, trace_id="t")
            finally:
                await peers.close()


async def test_calls_at_once_greet_each_for_itself():
    async with guarded() as url:
        pool = HttpPool("d0", url, KEY)
        bodies = [b"%d" % number for number in range(40)]
        for _ in range(3):
            calls = [HttpCall(pool, "POST", "/kv/renew", "", [body]).ask() for body in bodies]
            assert await asyncio.gather(*calls) == bodies
        await pool.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nx-epd-nonce: " + b"0" * 32 + b"\r\nx-epd-proof: " + b"0" * 64 + b"\r\n\r\n",
    ],
    ids=range(4),
)
async def test_a_stranger_at_an_instances_address_hears_neither_key_nor_request(said):
    stranger = Between(said=said)
    async with listening(stranger) as url:
        with pytest.raises(InstanceUntrusted, match=r"d0 at .* does not prove that it has this deployment's"):
            await asked(url)
    assert stranger.heard.startswith(b"POST " + HELLO.encode())
    assert KEY.encode() not in stranger.heard and SECRET.encode() not in stranger.heard


async def test_an_instance_with_another_key_hears_nothing_either():
    async with guarded("another-key-of-somebody") as url:
        between = Between(url)
        async with listening(between) as through:
            with pytest.raises(InstanceUntrusted):
                await asked(through)
        with pytest.raises(InstanceUntrusted):
            await asked(url)
    assert SECRET.encode() not in between.heard


async def test_who_passes_the_greeting_on_proves_nothing():
    async with guarded() as url:
        between = Between(url)
        async with listening(between) as through:
            with pytest.raises(InstanceUntrusted, match="something lies in between"):
                await asked(through)
        assert SECRET.encode() not in between.heard
        assert await asked(url) == SECRET.encode()


async def test_an_instance_may_be_reached_where_it_says_that_it_is():
    between = Between()
    async with listening(between) as through, guarded(own=through.removeprefix("http://")) as url:
        between._target = url.removeprefix("http://").split(":")
        assert await asked(through) == SECRET.encode()
        assert KEY.encode() not in between.heard


async def test_a_proof_holds_on_its_own_connection_and_once():
    between = Between()
    async with listening(between) as through, guarded(own=through.removeprefix("http://")) as url:
        between._target = url.removeprefix("http://").split(":")
        await asked(through)
        [proof] = [line for line in between.heard.split(b"\r\n") if line.startswith(b"x-epd-proof: ")]
        greeting = Greeting(KEY, Endpoint("instance", url.removeprefix("http://"))).headers.encode()
        host, port = url.removeprefix("http://").split(":")
        for hello in (
            b"",
            b"POST %b HTTP/1.1\r\nhost: h\r\n%bcontent-length: 0\r\n\r\n" % (HELLO.encode(), greeting),
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(hello)
            if hello:
                assert b"204" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"POST /kv/renew HTTP/1.1\r\nhost: h\r\n%b\r\ncontent-length: 0\r\n\r\n" % proof)
            assert b" 401 " in await reader.readline()
            writer.close()


async def test_a_peer_without_the_key_is_a_failed_instance(monkeypatch):
    monkeypatch.setenv(CLUSTER_KEY, KEY)
    peers = Peers()
    async with listening(Between(said=b"HTTP/1.1 204 No Content\r\n\r\n")) as url:
        with pytest.raises(InstanceFailed, match="does not prove"):
            await peers.call(url, "/kv/renew", wire.TransferRef("t", "r"))
    await peers.close()


TEXT = st.text(st.characters(max_codepoint=255), max_size=80)


@given(
    st.lists(
        st.tuples(st.sampled_from(["x-epd-nonce", "x-epd-reached", "x-epd-proof", "host"]), TEXT), max_size=6
    ),
    st.sampled_from([HELLO, "/kv/renew"]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_headers_come_nobody_is_let_in(headers: list[tuple[str, str]], path: str) -> None:
    statuses: list[int] = []

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            statuses.append(event["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    state = with_link({})
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "state": state}
    scope["server"] = ("127.0.0.1", 9000)
    asyncio.run(ClusterLinks(app, KEY, "instance", lambda: "")(scope, receive, send))
    assert len(statuses) == 1
    assert statuses[0] in ((400, 421) if path == HELLO else (200, 401))
    assert not next(iter(state.values())).proved


@given(st.dictionaries(st.sampled_from([b"x-epd-nonce", b"x-epd-proof"]), st.binary(max_size=80)))
def test_whatever_a_server_answers_it_proves_nothing(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(NotProved):
        Greeting(KEY, Endpoint("instance", "127.0.0.1:9000")).answer(headers)


def test_an_address_has_one_spelling() -> None:
    assert address_text("::ffff:10.0.0.3", 9000) == address_text("10.0.0.3", 9000) == "10.0.0.3:9000"
    assert address_text("fe80:0::1%eth0", 1) == "[fe80::1]:1"
