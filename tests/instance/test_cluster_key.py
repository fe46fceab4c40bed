"""Instances and their callers prove to each other that they have the deployment's key, which never travels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links import link_server
from servers import served

from epd_serve.errors import InstanceFailed, InstanceUntrusted, ServeError
from epd_serve.instance.calls import Peers
from epd_serve.protocol import wire
from epd_serve.rpc.cluster import CLUSTER_KEY, Service, address_text
from epd_serve.rpc.link import Link
from epd_serve.rpc.messages import LENGTH, OPENING, Hello, Proof, Welcome, pack, pack_call
from epd_serve.rpc.server import Reply

KEY = "0123456789abcdef-"
SECRET = "what the client asked"


@contextlib.asynccontextmanager
async def guarded(key: str = KEY, own: str = "", service: Service = "instance") -> AsyncIterator[str]:
    """URL of a server with that key, which answers everything with what it was sent."""

    async def answer(body: bytes) -> Reply:
        return Reply(body=body)

    calls = ("/health", "/health/live", "/metrics", "/info", "/kv/renew", "/prompt/detokenize")
    async with served(link_server(dict.fromkeys(calls, answer), key, lambda: own, service)) as url:
        yield url


class Between:
    """Passes bytes on between its callers and ``url``, if any, and keeps them; else it answers ``said``.

    Attributes:
        meant: replaces the server that its callers mean to greet.
    """

    meant = ""

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
                    if self.meant and data.startswith(OPENING):
                        hello = msgspec.msgpack.decode(data[len(OPENING) + LENGTH.size :], type=Hello)
                        data = OPENING + bytes(pack(Hello(hello.nonce, self.meant)))
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


async def asked(url: str, key: str | None = KEY, service: Service = "instance") -> bytes:
    async with Link("d0", url, key, service) as link:
        return await link.ask("/kv/renew", [SECRET.encode()])


async def test_without_a_proof_there_are_health_and_metrics_alone():
    async with guarded() as url, aiohttp.ClientSession() as session:
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/health/live", 200),
            ("GET", "/metrics", 200),
            ("POST", "/health", 404),
            ("GET", "/info", 401),
            ("POST", "/kv/renew", 401),
            ("GET", "/nowhere", 401),
        ):
            async with session.request(method, url + path, headers={"x-epd-cluster-key": KEY}) as response:
                assert response.status == status, path
                assert KEY not in await response.text()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        OPENING + bytes(pack(Welcome("", ""))),
        OPENING + bytes(pack(Welcome("0" * 32, "0" * 64))),
    ],
    ids=range(3),
)
async def test_a_stranger_at_an_instances_address_hears_neither_key_nor_request(said):
    stranger = Between(said=said)
    async with listening(stranger) as url:
        with pytest.raises(InstanceUntrusted, match=r"d0 at .* does not (prove that it has|speak)"):
            await asked(url)
    assert stranger.heard.startswith(OPENING)
    assert KEY.encode() not in stranger.heard and SECRET.encode() not in stranger.heard


async def test_callers_hear_an_instance_that_has_their_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, ref = Peers(), wire.TransferRef("t", "r")
    monkeypatch.setenv(CLUSTER_KEY, KEY)
    async with guarded() as url, guarded("another-key-of-somebody") as other:
        assert await peers.call(url, "/kv/renew", ref) == wire.encode(ref)
        with pytest.raises(InstanceFailed):
            await peers.call(other, "/kv/renew", ref)
        with pytest.raises(ServeError) as refused:
            await asked(url, None)
        assert refused.value.status == 500, "another instance may have the key"
    await peers.close()


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("asked_for", ["instance", "admin"])
@pytest.mark.parametrize(
    ("key", "service"), [(KEY, "instance"), (KEY, "admin"), ("another-key-of-somebody", "instance")]
)
async def test_who_passes_a_greeting_on_proves_nothing(
    key: str, service: Service, asked_for: Service, rewritten: bool
) -> None:
    async with guarded(key, service=service) as url:
        between = Between(url)
        async with listening(between) as through:
            if rewritten:  # so that the target takes itself for the one that is meant
                between.meant = f"{service} {url.removeprefix('http://')}"
            with pytest.raises(InstanceUntrusted, match="another key" if rewritten else "a proxy in between"):
                await asked(through, service=asked_for)
        assert between.heard.startswith(OPENING) and len(between.heard) < 200
        assert SECRET.encode() not in between.heard


async def test_a_proof_holds_at_the_advertised_address_and_on_its_own_connection_alone():
    between = Between()
    async with listening(between) as through, guarded(own=through.removeprefix("http://")) as url:
        host, port = between._target = url.removeprefix("http://").split(":")
        assert await asked(through) == SECRET.encode()
        assert KEY.encode() not in between.heard
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(between.heard)  # greeting, proof and call again
        answer = await reader.read()
        assert answer.startswith(OPENING) and SECRET.encode() not in answer
        writer.close()


TEXT = st.text(max_size=80)
NONCES = TEXT | st.just("0" * 32)


@given(st.lists(st.builds(Hello, NONCES, TEXT) | st.builds(Proof, TEXT) | st.binary(max_size=40), max_size=3))
@settings(max_examples=50, deadline=None)
def test_whatever_a_caller_says_nobody_is_let_in(said: list[Any]) -> None:
    frames = b"".join(one if isinstance(one, bytes) else bytes(pack(one)) for one in said)
    call = b"".join(pack_call(1, "/kv/renew", [SECRET.encode()]))

    async def scenario() -> None:
        async with guarded() as url:
            host, port = url.removeprefix("http://").split(":")
            for reached in (b"", bytes(pack(Hello("0" * 32, f"instance {host}:{port}")))):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(OPENING + reached + frames + call)
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    assert SECRET.encode() not in await reader.read()
                writer.close()

    asyncio.run(scenario())


def test_an_address_has_one_spelling() -> None:
    assert address_text("::ffff:10.0.0.3", 9000) == address_text("10.0.0.3", 9000) == "10.0.0.3:9000"
    assert address_text("fe80:0::1%eth0", 1) == "[fe80::1]:1"
