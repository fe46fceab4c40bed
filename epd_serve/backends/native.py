"""Stage calls to a native instance, in MessagePack, as listed in :mod:`epd_serve.protocol.wire`.

All calls share one link (:mod:`epd_serve.rpc.link`). Info and probes use separate connections, since the
shared one may lead to a dead host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self
from weakref import WeakSet

import msgspec

from epd_serve.errors import InstanceLost, InstanceUntrusted, StageTimeout
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.http import HttpPool
from epd_serve.rpc.link import MAX_BODY_BYTES, MAX_NOTE_BYTES, Link, LinkCall
from epd_serve.rpc.tls import TlsFiles

INFO_TIMEOUT_S = 10.0
_MAX_REPORT_BYTES = 1 << 20
_NEXT = wire.NEXT_HEADER.encode()
_NOTE = wire.PROMPT_NOTE_HEADER.lower().encode()


class NativeConnections:
    """The connections to all instances of a caller; an async context manager that closes them.

    Attributes:
        http: connections to vLLM's servers.
    """

    def __init__(self, key: str | None = None, tls: TlsFiles | None = None) -> None:
        """``key`` and ``tls``: the cluster's, as for :class:`Link`."""
        self._key = key
        self._tls = tls
        self._links: WeakSet[Link] = WeakSet()  # links of removed instances vanish with their calls
        self.http = HttpPool(tls)

    def link(self, name: str, url: str) -> Link:
        """Return a link to an instance."""
        link = Link(name, url, self._key, tls=self._tls)
        self._links.add(link)
        return link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*[link.close() for link in list(self._links)])
        await self.http.__aexit__()


class _StageCall(LinkCall):
    """A :class:`epd_serve.backends.base.StageCall` and its Answer."""

    knows_tokens = True

    @property
    def decode_follows(self) -> bool:
        return self.headers.get(_NEXT) == b"decode"

    @property
    def prompt_note(self) -> str:
        return self.headers.get(_NOTE, b"").decode("latin-1")


class NativeInstance:
    """:class:`epd_serve.backends.base.StageCalls` of one native instance."""

    def __init__(self, connections: NativeConnections, name: str, url: str) -> None:
        self._connections = connections
        self._link = connections.link(name, url)
        self.name = name
        self.url = self._link.url

    async def info(self) -> instance_state.InstanceInfo:
        """Return the instance's info.

        Raises InstanceLost also if the answer is invalid or takes longer than INFO_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S), self._connections.link(self.name, self.url) as link:
                body = await link.ask("/info")
            return msgspec.json.decode(body, type=instance_state.InstanceInfo)
        except TimeoutError as error:
            raise InstanceLost(
                f"instance {self.name} at {self.url} said nothing in {INFO_TIMEOUT_S:g} s"
            ) from error
        except ValueError as error:  # also invalid UTF-8
            raise InstanceUntrusted(f"{self.url}/info returned an invalid answer ({error})") from error

    async def probe(self, timeout_s: float) -> None:
        """Check that the process answers. A hanging step ends it (:mod:`epd_serve.engine.pace`)."""
        try:
            async with asyncio.timeout(timeout_s), self._connections.link(self.name, self.url) as link:
                await link.ask("/health")
        except TimeoutError as error:
            raise StageTimeout(f"instance {self.name} does not answer within {timeout_s:g} s") from error

    async def switch(self, order: instance_state.RoleOrder) -> instance_state.RoleChanged:
        return await self._ask("/role", [wire.encode(order)], instance_state.RoleChanged)

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        return await self._ask("/leave", [wire.encode(order)], instance_state.Left)

    async def reports(self) -> AsyncGenerator[instance_state.Report, None]:
        call = LinkCall(self._link, "/reports", ())
        self._link.send(call)
        line = b""
        try:
            await call.opened
            async for chunk in call.chunks():
                *lines, line = (line + chunk).split(b"\n")
                if len(line) > _MAX_REPORT_BYTES:
                    raise ValueError(f"a line of more than {_MAX_REPORT_BYTES} bytes")
                for one in lines:
                    yield msgspec.json.decode(one, type=instance_state.Report)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise InstanceUntrusted(f"{self.url}/reports sent an invalid report ({error})") from error
        finally:
            call.close()

    async def encode(self, request: wire.EncodeRequest, *, trace_id: str) -> wire.EncodeReply:
        return await self._ask("/stage/encode", wire.encode_in_parts(request), wire.EncodeReply)

    async def tokenize(self, request: wire.TokenizeRequest, *, trace_id: str) -> wire.TokenizeReply:
        return await self._ask("/prompt/tokenize", [wire.encode(request)], wire.TokenizeReply, MAX_BODY_BYTES)

    async def detokenize(self, request: wire.DetokenizeRequest, *, trace_id: str) -> wire.DetokenizeReply:
        return await self._ask("/prompt/detokenize", [wire.encode(request)], wire.DetokenizeReply, MAX_BODY_BYTES)

    async def _ask(
        self, path: str, request: list[bytes], reply_type: type[wire.M], max_bytes: int = MAX_NOTE_BYTES
    ) -> wire.M:
        body = await self._link.ask(path, request, max_bytes)
        try:
            return wire.decode(body, reply_type)
        except ValueError as error:  # also invalid UTF-8
            raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error

    def prefill(self, request: wire.PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()) -> _StageCall:
        return self._begin("/stage/prefill", request)

    def decode(self, request: wire.DecodeRequest, *, trace_id: str) -> _StageCall:
        return self._begin("/stage/decode", request)

    def _begin(self, path: str, request: wire.Message) -> _StageCall:
        call = _StageCall(self._link, path, [wire.encode(request)])
        self._link.send(call)
        return call
