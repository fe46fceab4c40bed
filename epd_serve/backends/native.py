"""Stage calls to our own worker: msgpack over HTTP, as listed in :mod:`epd_serve.protocol.wire`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from epd_serve.backends.base import InstanceLost
from epd_serve.errors import InvalidRequest, StageTimeout, error_from_response
from epd_serve.protocol import frames, prompt_note, wire
from epd_serve.protocol.prompt_calls import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

INFO_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
#: Beyond the time that a probe gives the instance.
PROBE_MARGIN_S = 0.5
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
KEEP_ALIVE_S = 3.0
LARGE_BODY_BYTES = 256 * 1024


class NativeConnections:
    """The connections of all :class:`NativeInstance` of a caller; an async context manager that closes them.

    There are as many connections as there are calls, and no limit on how long a call may take: the caller sets it.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used before its context was entered"
        return self._session


@dataclass(frozen=True, slots=True)
class _Answer:
    response: aiohttp.ClientResponse
    origin: str

    @property
    def decode_follows(self) -> bool:
        return self.response.headers.get(wire.NEXT_HEADER) == "decode"

    @property
    def framed(self) -> bool:
        return self.response.headers.get("content-type") == frames.CONTENT_TYPE

    @property
    def prompt_note(self) -> str:
        return self.response.headers.get(prompt_note.HEADER, "")

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise InstanceLost(f"instance {self.origin} broke off its answer ({error})") from error


class NativeInstance:
    """:class:`epd_serve.backends.base.StageCalls` of one worker process."""

    def __init__(self, connections: NativeConnections, name: str, url: str) -> None:
        self._connections = connections
        self.name = name
        self.url = url.rstrip("/")

    async def info(self) -> wire.InstanceInfo:
        """Raises InstanceLost also for an answer that is no InstanceInfo or takes over INFO_TIMEOUT_S."""
        try:
            async with (
                asyncio.timeout(INFO_TIMEOUT_S),
                self._connections.session.get(f"{self.url}/info") as response,
            ):
                body = await response.read()
                await self._check(response, body)
                return wire.from_json(body, wire.InstanceInfo)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        except msgspec.MsgspecError as error:
            raise InstanceLost(f"{self.url}/info is no answer of an instance ({error})") from error

    async def probe(self, timeout_s: float) -> None:
        """An instance without that call counts as one that computes. Raises ServeError."""
        try:
            async with (
                asyncio.timeout(timeout_s + PROBE_MARGIN_S),
                self._post("/probe", wire.ProbeRequest(timeout_s), "probe") as response,
            ):
                await response.read()
        except InvalidRequest:
            return
        except TimeoutError as error:
            raise StageTimeout(f"instance {self.name} does not answer within {timeout_s:g} s") from error

    async def reports(self) -> AsyncGenerator[wire.Report, None]:
        try:
            async with self._connections.session.get(f"{self.url}/reports") as response:
                if response.status >= 400:
                    await self._check(response, await response.read())
                async for line in response.content:
                    yield wire.from_json(line, wire.Report)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        except ValueError as error:  # of msgspec's too, and of aiohttp's for a line that has no end
            raise InstanceLost(f"{self.url}/reports are no reports of an instance ({error})") from error

    async def encode(self, request: wire.EncodeRequest, *, trace_id: str) -> wire.EncodeReply:
        return await self._ask("/stage/encode", request, wire.EncodeReply, trace_id)

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        return await self._ask("/prompt/tokenize", request, TokenizeReply, trace_id)

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        return await self._ask("/prompt/detokenize", request, DetokenizeReply, trace_id)

    async def _ask(self, path: str, request: wire.Message, reply_type: type[wire.M], trace_id: str) -> wire.M:
        async with self._post(path, request, trace_id) as response:
            try:
                return wire.decode(await response.read(), reply_type)
            except (aiohttp.ClientError, OSError) as error:
                raise self._lost(error) from error
            except msgspec.MsgspecError as error:
                raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error

    @asynccontextmanager
    async def prefill(self, request: wire.PrefillRequest, *, trace_id: str) -> AsyncIterator[_Answer]:
        async with self._post("/stage/prefill", request, trace_id) as response:
            yield _Answer(response, self.name)

    @asynccontextmanager
    async def decode(self, request: wire.DecodeRequest, *, trace_id: str) -> AsyncIterator[_Answer]:
        async with self._post("/stage/decode", request, trace_id) as response:
            yield _Answer(response, self.name)

    @asynccontextmanager
    async def _post(
        self, path: str, message: wire.Message, trace_id: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"content-type": wire.CONTENT_TYPE, wire.REQUEST_ID_HEADER: trace_id}
        try:
            body = wire.encode(message)
            # As a file, a large body goes out piece by piece, and other requests get their turn in between.
            data = body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)
            response = await self._connections.session.post(self.url + path, data=data, headers=headers)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        try:
            if response.status >= 400:
                try:
                    body = await response.read()
                except (aiohttp.ClientError, OSError) as error:
                    raise self._lost(error) from error
                raise error_from_response(response.status, body, origin=f"instance {self.name}")
            yield response
        finally:
            # Gives the connection back where the answer was read to its end; otherwise closes it, which is how the
            # instance learns that nobody waits any more.
            response.close() if not response.content.at_eof() else response.release()

    async def _check(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        if response.status >= 400:
            raise error_from_response(response.status, body, origin=f"instance {self.name}")

    def _lost(self, error: Exception) -> InstanceLost:
        return InstanceLost(
            f"instance {self.name} at {self.url} is not reachable ({error or type(error).__name__})"
        )
