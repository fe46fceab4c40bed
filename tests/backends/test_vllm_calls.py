"""Calls to vLLM servers that say odd things, or say them in odd pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from links import linked
from vllm_backend import target

from epd_serve.backends import vllm
from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstances
from epd_serve.backends.vllm_answer import Correction, Events, PrefillAnswer, VllmAnswer
from epd_serve.backends.vllm_command import FEATURE_PORT, KV_PORT
from epd_serve.errors import InstanceFailed, InstanceLost
from epd_serve.protocol.wire import (
    ChatMessage,
    DecodeRequest,
    EncodeRequest,
    FeatureWithdrawn,
    MediaRef,
    OutputOptions,
    Part,
    PrefillRequest,
    decode,
)
from epd_serve.rpc.http import HttpServer
from epd_serve.rpc.items import ItemReader
from epd_serve.rpc.server import Reply
from epd_serve.types import SamplingParams

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[int]:
    """The port of a server that says what ``talk`` does, on one connection after the other."""
    open_ones: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            open_ones.discard(task)
            writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in list(open_ones):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


def answering(body: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    return talk


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


EVENTS = b'data: {"choices":[{"index":0}]}\n\n'
ERROR = b'data: {"error":{"message":"the engine is dead","code":500}}\n\n'


async def forwarded(port: int, correction: Correction | None = None, room: int = 1000) -> tuple[bytes, str]:
    """The events of a stream that are passed on, and the failure it ends with; ``room`` writes at a time."""
    reader, written, left = ItemReader(), list[bytes](), room

    def write(chunk: bytes) -> bool:
        nonlocal left
        written.append(reader.read(chunk))
        left -= 1
        return left > 0

    async with NativeConnections() as connections:
        server = HttpServer("d0", f"http://127.0.0.1:{port}", connections.http)
        answer = VllmAnswer(server, await server.send("GET", "/"), Events("d0", correction))
        try:
            while not await answer.forward(write):
                left = room
        except InstanceFailed as error:
            return b"".join(written), error.message
        finally:
            answer.close()
    return b"".join(written), ""


@pytest.mark.parametrize("size", [1, 7, 20, 40, 1000])
@pytest.mark.parametrize("rewrites", [False, True])
async def test_an_error_event_is_one_however_it_is_cut(size: int, rewrites: bool) -> None:
    body = EVENTS + ERROR

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(body) + 14))
        for start in range(0, len(body), size):
            writer.write(body[start : start + size])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    async with server(talk) as port:
        passed, failure = await forwarded(port, Correction(first_index=2) if rewrites else None, room=1)
    assert passed == EVENTS.replace(b'"index":0', b'"index":2' if rewrites else b'"index":0')
    assert "the engine is dead" in failure


async def test_a_stream_is_passed_on_whole_to_a_slow_client() -> None:
    body = EVENTS * 50 + b"data: [DONE]\n\n"
    async with server(answering(body)) as port:
        assert await forwarded(port, Correction(), room=1) == (body, "")


async def test_what_is_no_answer_is_the_instances_failure() -> None:
    async with server(answering(EVENTS + b"data: {oops\n\n")) as port:
        passed, failure = await forwarded(port, Correction())
    assert "unreadable" in failure
    async with server(answering(EVENTS + b"data: {")) as port:
        passed, failure = await forwarded(port)
    assert (passed, "in the middle of an event" in failure) == (EVENTS, True)


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (silence, "did not answer"),
        (answering(b"[]"), "not an answer of Mooncake"),
        (answering(b"<html>"), "not an answer"),
    ],
)
async def test_a_bootstrap_server_that_tells_no_engine_is_a_lost_instance(
    talk: Talk, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "INFO_TIMEOUT_S", 0.3)
    async with server(talk) as port, NativeConnections() as connections:
        others = VllmInstances(connections, {"p0": target("P", kv="mooncake")})
        prefill = others.connect("p0", f"http://127.0.0.1:{port - KV_PORT}")
        with pytest.raises(InstanceLost, match=words):
            await prefill.engine_id()


async def test_a_p_is_told_over_a_link_that_it_encodes_an_item_itself() -> None:
    told: list[FeatureWithdrawn] = []

    async def withdraw(body: bytes) -> Reply:
        told.append(decode(body, FeatureWithdrawn))
        return Reply()

    calls = linked({"/feature/withdraw": withdraw}, "a-key-of-16-characters", host="::1")
    async with calls as url, NativeConnections("a-key-of-16-characters") as connections:
        port = int(url.rpartition(":")[2]) - FEATURE_PORT
        others = VllmInstances(connections, {"p0": target("P", features="store")})
        ref = MediaRef(mm_hash="a", width=1, height=1)
        await others.connect("p0", f"http://[::1]:{port}").encode(EncodeRequest("r", ref, b"", ""), trace_id="t")
    assert told == [FeatureWithdrawn("r", "a")]


async def test_a_d_that_is_given_up_leaves_p_its_answer() -> None:
    """P computes nothing of several choices, and D waits for its answer: closed, it must not take that along."""
    async with NativeConnections() as connections:
        targets = {"p0": target("P", features="file", kv="nixl", pulls=True), "d0": target("D", kv="nixl")}
        others = VllmInstances(connections, targets)
        prefill, decode = (others.connect(name, "http://127.0.0.1:1") for name in targets)
        ref = MediaRef(mm_hash="a", width=1, height=1)
        request = PrefillRequest(
            request_id="r",
            output=OutputOptions(kind="chat", id="c-1", created=0, model="m"),
            sampling=SamplingParams(seed=0, temperature=1.0, n=2),
            items=[ref],
            messages=[ChatMessage(role="user", content=[Part(type="image")])],
            decode_url="http://127.0.0.1:1",
        )
        call = prefill.prefill(request, trace_id="r", media=[b""])
        waiting = decode.decode(DecodeRequest(request_id="r", stream=False), trace_id="r")
        await asyncio.sleep(0)  # both wait: P for E, D for P
        waiting.close()
        await asyncio.sleep(0)
        others.exchanges["r"].encoded.set()
        assert isinstance(await call.opened, PrefillAnswer)
        call.close()
