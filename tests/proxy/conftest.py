"""Stage instances that play a script over real sockets, and a gateway in front of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import io
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import uvicorn
from gateway_settings import gateway_settings
from instance_info import instance_info
from item_bodies import whole_items
from PIL import Image
from program import until
from servers import QuietServer

from epd_serve.errors import ServeError
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc import items
from epd_serve.rpc.server import LinkService, Port, Reply
from proxy.app import create_app
from proxy.fleet import Member
from proxy.http.server import new_server

MESSAGES: dict[str, type[wire.Message]] = {
    "/stage/encode": wire.EncodeRequest,
    "/stage/prefill": wire.PrefillRequest,
    "/stage/decode": wire.DecodeRequest,
    "/role": instance_state.RoleOrder,
    "/leave": instance_state.LeaveOrder,
    "/prompt/tokenize": wire.TokenizeRequest,
}


def frame(number: int, *, end: bool = False) -> bytes:
    """The frame of a choice's token, which is its number."""
    if end:
        return items.pack(items.END, (), DONE)
    return items.pack(0, (number,), b'data: {"token":%d}\n\n' % number)


def events_of(body: bytes) -> bytes:
    """The server-sent events of an answer's frames."""
    return b"".join(events for *_, events in whole_items(body))


FIRST = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}\n\n'
REST = b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"object":"chat.completion"}'


def sent(*events: bytes) -> bytes:
    """The frames in which an instance sends events, each a token; DONE is the last."""
    return b"".join(frame(0, end=True) if event == DONE else items.pack(0, (1,), event) for event in events)


#: Steps of a script: seconds to wait, (status, headers) to start the answer, bytes of its body, a
#: function that makes one of these or is awaited, or one of these words.
DIE, FOREVER = "die", "forever"
Script = list[Any]


def fail(status: int, message: str, **more: Any) -> Script:
    body = {"error": {"message": message, "type": "test_error", **more}}
    return [(status, {}), json.dumps(body).encode()]


def post(body: Any, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


class Told(ServeError):
    """An error of a script, as it stands there."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__("")
        self.status = status  # type: ignore[misc]
        self._body = body

    def to_json(self) -> bytes:
        return self._body


class FakeInstance:
    """Answers calls as an instance does.

    ``scripts`` maps a path to a function from the message to a script; without one it answers as it should.
    ``report`` makes its next report, if it makes any. While it ``hangs`` it is silent, and does not answer
    ``/info``, for which it was asked ``num_asked`` times.
    ``calls`` and ``cancelled`` record (path, message) of what came in and what the gateway broke off.
    """

    def __init__(self, name: str, role: str, **info: Any) -> None:
        self.name = name
        self.role = role
        self.info = info
        self.url = ""
        self.loading = False
        self.hangs = False
        self.num_asked = 0
        self.report: Callable[[], instance_state.Report] | None = None
        self.scripts: dict[str, Callable[[Any], Script]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.cancelled: list[tuple[str, Any]] = []
        self._transports: set[Any] = set()

    def got(self, path: str) -> list[Any]:
        return [message for called, message in self.calls if called == path]

    def server(self, key: str | None = None, port: int = 0) -> uvicorn.Server:
        """A server of its calls, for callers that prove ``key`` if there is one."""
        calls = {path: partial(self._call, path) for path in MESSAGES}
        calls |= {"/info": self._tell, "/health": self._answer_probe, "/reports": self._begin_reports}
        service = LinkService(calls=calls, key=key)

        class Watched(Port):
            def connection_made(watched, transport: Any) -> None:
                self._transports.add(transport)
                super().connection_made(transport)

        http: Any = partial(Watched, service)
        config = uvicorn.Config(
            no_http,
            host="127.0.0.1",
            port=port,
            http=http,
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)

    async def _tell(self, body: bytes) -> Reply:
        self.num_asked += 1
        while self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self.loading:
            return await self._play(fail(503, "the instance is loading its model"))
        return Reply(body=msgspec.json.encode(self._info()))

    async def _answer_probe(self, body: bytes) -> Reply:
        return await self._play(self.scripts.get("/health", lambda _: [(200, {})])(None))

    async def _begin_reports(self, body: bytes) -> Reply:
        if self.report is None:
            return await self._play(fail(404, "there is no GET /reports"))
        return Reply(stream=self._reports())

    async def _reports(self) -> AsyncGenerator[bytes, None]:
        while self.report is not None:
            if not self.hangs:
                yield msgspec.json.encode(self.report()) + b"\n"
            await asyncio.sleep(0.05)

    async def _call(self, path: str, body: bytes) -> Reply:
        message: Any = wire.decode(body, MESSAGES[path])
        self.calls.append((path, message))
        script = self.scripts.get(path, self.regular)(message)
        return await self._play(script, lambda: self.cancelled.append((path, message)))

    async def _play(self, script: Script, cancel: Callable[[], None] = lambda: None) -> Reply:
        """Play a script up to its head; the rest is the reply's stream. ``cancel``: called if it is broken off."""
        steps, is_over = iter(script), False

        async def pieces() -> AsyncGenerator[Any, None]:
            nonlocal is_over
            for step in steps:
                if callable(step):
                    step = step()  # as late as that
                if inspect.isawaitable(step):
                    await step
                elif step == DIE:
                    await asyncio.sleep(0.01)  # what was sent before leaves the socket first
                    is_over = True
                    for transport in self._transports:
                        transport.abort()
                    await asyncio.sleep(3600)
                elif step == FOREVER:
                    await asyncio.sleep(3600)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
            is_over = True

        def close() -> None:
            if not is_over:
                cancel()

        played = pieces()
        try:
            status, headers = await anext(played)
        except asyncio.CancelledError:
            close()
            raise
        if status >= 400:
            raise Told(status, b"".join([piece async for piece in played]))
        told = tuple((name.encode(), value.encode()) for name, value in headers.items())
        return Reply(headers=told, stream=played, on_close=close)

    def regular(self, message: Any) -> Script:
        if isinstance(message, wire.EncodeRequest):
            return [(200, {}), wire.encode(wire.EncodeReply(cached=False))]
        if isinstance(message, wire.TokenizeRequest):
            return [(200, {}), wire.encode(wire.TokenizeReply(tokens=[1, 2]))]
        if isinstance(message, wire.DecodeRequest):
            return [0.05, (200, {}), sent(REST, DONE) if message.stream else WHOLE]
        follows = message.decode_url is not None
        start = (200, {wire.NEXT_HEADER: "decode" if follows else "none"})
        if message.output.stream:
            return [0.01, start, sent(FIRST) if follows else sent(FIRST, REST, DONE)]
        return [0.01, start] if follows else [0.01, start, WHOLE]

    def _info(self) -> instance_state.InstanceInfo:
        values: dict[str, Any] = {
            "url": self.url,
            "model": "demo",
            "model_path": "/models/demo",
            "max_model_len": 65536,
            "media_fingerprint": "f00d",
        }
        return instance_info(self.name, self.role, **values | self.info)


class Servers:
    """Servers inside the test's loop, stopped together."""

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def add(self, server: uvicorn.Server) -> str:
        """Start a server; returns its URL."""
        server.__class__ = QuietServer
        task = asyncio.create_task(server.serve())
        self._running.append((server, task))
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        for server, _ in self._running:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))


async def no_http(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def run_fakes(servers: Servers, *instances: str) -> list[FakeInstance]:
    """Instances as in ``"p0:P"``, each with its URL."""
    fakes = [FakeInstance(*instance.split(":")) for instance in instances]
    for fake in fakes:
        fake.url = await servers.add(fake.server())
    return fakes


class Gateway:
    """A running gateway, a client session for it, and its instance table."""

    def __init__(self, url: str, app: Any, session: aiohttp.ClientSession, fakes: list[FakeInstance]) -> None:
        self.url = url
        self.address = "127.0.0.1", int(url.rpartition(":")[2])
        self.fakes = {fake.name: fake for fake in fakes}
        self.app = app
        self.fleet = app.state.gateway.fleet
        self.table = self.fleet.table
        self.admission = app.state.gateway.admission
        self.session = session

    def __getitem__(self, name: str) -> FakeInstance:
        return self.fakes[name]

    def become(self, instances: Sequence[tuple[str, str]]) -> None:
        """Replace the gateway's instances, as ``epd-serve apply`` does."""
        members = {name: Member(url=url, role="") for name, url in instances}
        self.fleet.replace(members, None)

    def post(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | dict(more.pop("headers", None) or {})
        return self.session.post(self.url + path, data=io.BytesIO(data), headers=headers, **more)

    async def answer(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, bytes]:
        async with self.post(body, path, **more) as response:
            return response.status, await response.read()

    async def error(
        self, body: Any, path: str = "/v1/chat/completions", **more: Any
    ) -> tuple[int, dict[str, Any]]:
        """Status and error object of a refused request; the object must have OpenAI's shape."""
        status, data = await self.answer(body, path, **more)
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) > 15
        return status, error

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection over which a test says what it likes."""
        reader, writer = await asyncio.open_connection(*self.address)
        yield reader, writer
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def unread(self, body: Any) -> AsyncIterator[socket.socket]:
        """A socket that has sent a request and holds little of its answer."""
        loop = asyncio.get_running_loop()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await loop.sock_connect(one, self.address)
            await loop.sock_sendall(one, post(body))
            yield one

    async def raw(self, body: Any) -> bytes:
        """All bytes of the answer until the gateway closes the connection."""
        async with self.connection() as (reader, writer):
            writer.write(post(body, "connection: close"))
            return await reader.read()

    async def text(self, path: str) -> str:
        """The text of a page of its own, such as /metrics."""
        async with self.session.get(self.url + path) as response:
            return await response.text()

    until = staticmethod(until)

    async def settle(self) -> None:
        """Wait until no call is in flight."""
        await self.until(lambda: not any(sum(record.in_flight.values()) for record in self.table))


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """``await start("e0:E", "p0:P", "d0:D", **settings)`` → Gateway before these, all ready or all loading."""
    servers = Servers()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(servers.stop)

        async def start_gateway(
            *instances: str, loading: bool = False, reporting: bool = False, **settings: Any
        ) -> Gateway:
            fakes = await run_fakes(servers, *instances)
            for fake in fakes:
                fake.loading = loading
                if reporting:
                    fake.report = lambda: instance_state.Report(load=instance_state.Load())
            chosen = gateway_settings(**settings)
            app = create_app(chosen, [(fake.name, fake.url) for fake in fakes])
            url = await servers.add(new_server(app, "127.0.0.1", 0))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            gateway = Gateway(url, app, session, fakes)
            if not loading:
                await gateway.until(lambda: all(record.ready for record in gateway.table))
            return gateway

        yield start_gateway


@pytest.fixture
def kit() -> SimpleNamespace:
    """The parts from which tests build requests and scripts (modules under tests/ cannot import each other)."""
    return SimpleNamespace(
        FIRST=FIRST,
        REST=REST,
        DONE=DONE,
        WHOLE=WHOLE,
        DIE=DIE,
        FOREVER=FOREVER,
        DECODE=(200, {wire.NEXT_HEADER: "decode"}),
        NONE=(200, {wire.NEXT_HEADER: "none"}),
        fail=fail,
        frame=frame,
        sent=sent,
        events_of=events_of,
        FRAMES=(200, {"content-type": items.CONTENT_TYPE}),
        FRAMES_THEN_DECODE=(200, {"content-type": items.CONTENT_TYPE, wire.NEXT_HEADER: "decode"}),
        picture=picture,
        data_url=data_url,
        chat=chat,
        post=post,
    )


def picture(width: int = 6, height: int = 4, colour: str = "red", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, kind)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat(*images: str, **fields: Any) -> dict[str, Any]:
    """Body of a chat request: a question behind image URLs."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    content.append({"type": "text", "text": "What is it?"})
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
