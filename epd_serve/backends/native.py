"""Stage calls to a native instance, in MessagePack, as listed in :mod:`epd_serve.protocol.wire`.

Calls that answer with tokens share one connection (:mod:`epd_serve.rpc.streams`); the others go over HTTP: those
to E carry whole pictures, and are not to stand before anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self
from weakref import WeakSet

import msgspec

from epd_serve.errors import InstanceLost, InstanceUntrusted, StageTimeout
from epd_serve.protocol import frames, instance_state, wire
from epd_serve.protocol.wire import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    encode_in_parts,
)
from epd_serve.rpc.http import (
    MAX_BODY_BYTES,
    MAX_NOTE_BYTES,
    HttpCall,
    HttpPool,
)
from epd_serve.rpc.streams import StreamCall, Streams
from epd_serve.rpc.tls import TlsFiles

INFO_TIMEOUT_S = 10.0
_MAX_REPORT_BYTES = 1 << 20
_HEADERS = f"content-type: {wire.CONTENT_TYPE}\r\n{wire.REQUEST_ID_HEADER}: "
_CONTENT_TYPE = (b"content-type", wire.CONTENT_TYPE.encode())
_REQUEST_ID = wire.REQUEST_ID_HEADER.lower().encode()
_NEXT = wire.NEXT_HEADER.encode()
_FRAMES = frames.CONTENT_TYPE.encode()
_NOTE = wire.PROMPT_NOTE_HEADER.lower().encode()


class NativeConnections:
    """The connections of all :class:`NativeInstance` of a caller; an async context manager that closes them.

    There are as many connections as there are calls, and no limit on how long a call may take: the caller sets it.
    """

    def __init__(self, key: str | None = None, tls: TlsFiles | None = None) -> None:
        """``key`` and ``tls``: of the cluster, as of :class:`HttpPool`."""
        self._key = key
        self._tls = tls
        # those of instances that have left go with their calls
        self._pools: WeakSet[HttpPool] = WeakSet()
        self._streams: WeakSet[Streams] = WeakSet()

    def pool(self, name: str, url: str) -> HttpPool:
        pool = HttpPool(name, url, self._key, tls=self._tls)
        self._pools.add(pool)
        return pool

    def streams(self, pool: HttpPool) -> Streams:
        """Streams to the server of a pool."""
        streams = Streams(pool)
        self._streams.add(streams)
        return streams

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*[streams.close() for streams in list(self._streams)])
        await asyncio.gather(*[pool.close() for pool in list(self._pools)])


class _StageCall(StreamCall):
    """:class:`epd_serve.backends.base.StageCall`, and the Answer that it opens with."""

    decode_follows = framed = False
    prompt_note = ""

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.decode_follows = headers.get(_NEXT) == b"decode"
        self.framed = headers.get(b"content-type") == _FRAMES
        self.prompt_note = headers.get(_NOTE, b"").decode("latin-1")
        super().begin(status, headers)


class NativeInstance:
    """:class:`epd_serve.backends.base.StageCalls` of one native instance."""

    def __init__(self, connections: NativeConnections, name: str, url: str) -> None:
        self._pool = connections.pool(name, url)
        self._streams = connections.streams(self._pool)
        self.name = name
        self.url = self._pool.url

    async def info(self, *, doubted: bool = False) -> instance_state.InstanceInfo:
        """Ask for the info.

        Raises InstanceLost also for an answer that is none, or that takes over INFO_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                body = await HttpCall(self._pool, "GET", "/info", on_new_connection=True).ask(MAX_NOTE_BYTES)
            return msgspec.json.decode(body, type=instance_state.InstanceInfo)
        except TimeoutError as error:
            raise InstanceLost(
                f"instance {self.name} at {self.url} said nothing in {INFO_TIMEOUT_S:g} s"
            ) from error
        except msgspec.MsgspecError as error:
            raise InstanceUntrusted(f"{self.url}/info is no answer of an instance ({error})") from error

    async def probe(self, timeout_s: float) -> None:
        """Ask whether the process answers. A step that hangs ends it (:mod:`epd_serve.engine.pace.step_watch`)."""
        try:
            async with asyncio.timeout(timeout_s):
                await HttpCall(self._pool, "GET", "/health", on_new_connection=True).ask(MAX_NOTE_BYTES)
        except TimeoutError as error:
            raise StageTimeout(f"instance {self.name} does not answer within {timeout_s:g} s") from error

    async def switch(self, order: instance_state.RoleOrder) -> instance_state.RoleChanged:
        """Order a role; return when the instance serves it. Raises the ServeError that it answers with."""
        return await self._ask("/role", [wire.encode(order)], instance_state.RoleChanged, "switch")

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        """Order the instance to leave; return when nothing is left there.

        Raises the ServeError that it answers with.
        """
        return await self._ask("/leave", [wire.encode(order)], instance_state.Left, "leave")

    async def reports(self) -> AsyncGenerator[instance_state.Report, None]:
        call = HttpCall(self._pool, "GET", "/reports")
        call.send()
        line = b""
        try:
            await call.opened
            async for chunk in call.chunks():
                *lines, line = (line + chunk).split(b"\n")
                if len(line) > _MAX_REPORT_BYTES:
                    raise ValueError(f"a line of more than {_MAX_REPORT_BYTES} bytes")
                for one in lines:
                    yield msgspec.json.decode(one, type=instance_state.Report)
        except ValueError as error:  # of msgspec's too
            raise InstanceUntrusted(f"{self.url}/reports are no reports of an instance ({error})") from error
        finally:
            call.close()

    async def encode(self, request: wire.EncodeRequest, *, trace_id: str) -> wire.EncodeReply:
        return await self._ask("/stage/encode", encode_in_parts(request), wire.EncodeReply, trace_id)

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        return await self._ask("/prompt/tokenize", [wire.encode(request)], TokenizeReply, trace_id, MAX_BODY_BYTES)

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        request_body = [wire.encode(request)]
        return await self._ask("/prompt/detokenize", request_body, DetokenizeReply, trace_id, MAX_BODY_BYTES)

    async def _ask(
        self,
        path: str,
        request: list[bytes],
        reply_type: type[wire.M],
        trace_id: str,
        max_bytes: int = MAX_NOTE_BYTES,
    ) -> wire.M:
        call = HttpCall(self._pool, "POST", path, f"{_HEADERS}{trace_id}\r\n", request)
        body = await call.ask(max_bytes)
        try:
            return wire.decode(body, reply_type)
        except msgspec.MsgspecError as error:
            raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error

    def prefill(self, request: wire.PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()) -> _StageCall:
        return self._post("/stage/prefill", request, trace_id)

    def decode(self, request: wire.DecodeRequest, *, trace_id: str) -> _StageCall:
        return self._post("/stage/decode", request, trace_id)

    def _post(self, path: str, request: wire.Message, trace_id: str) -> _StageCall:
        headers = [_CONTENT_TYPE, (_REQUEST_ID, trace_id.encode())]
        call = _StageCall(self._streams, path, headers, wire.encode(request))
        self._streams.send(call)
        return call
