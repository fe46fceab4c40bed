"""Calls in both directions between a worker and its parent, over one stream socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

logger = logging.getLogger(__name__)

#: Answers a call; its argument and its answer are MessagePack.
Handler = Callable[[bytes], Awaitable[bytes]]

NOTHING = msgspec.msgpack.encode(None)
_LENGTH = struct.Struct("!I")


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    kind: Literal["call", "answer", "fault"]
    number: int
    name: str
    body: bytes


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class CallFailed(Exception):
    """The other side could not answer; its log says more."""


class Channel:
    """Both sides trust each other: they are one program. A call that fails there is logged there.

    Args:
        handlers: what the other side may call, by name.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def open(self, sock: socket.socket) -> None:
        """Take over ``sock``; :meth:`run` must follow."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=sock)

    async def run(self) -> None:
        """Serve and be served until the other side closes."""
        reader, writer = self._reader, self._writer
        assert reader is not None and writer is not None, "open() comes first"
        try:
            async with asyncio.TaskGroup() as answering:
                while True:
                    try:
                        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                        frame = msgspec.msgpack.decode(await reader.readexactly(length), type=_Frame)
                    except (asyncio.IncompleteReadError, ConnectionError):
                        return
                    if frame.kind == "call":
                        answering.create_task(self._answer(frame))
                    elif (waiting := self._waiting.get(frame.number)) is not None and not waiting.done():
                        if frame.kind == "answer":
                            waiting.set_result(frame.body)
                        else:
                            waiting.set_exception(CallFailed(frame.name))
        finally:
            self._writer = None
            writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ChannelClosed("the other side is gone"))

    async def call(self, name: str, argument: Any = None, *, timeout_s: float) -> bytes:
        """The answer. Raises ChannelClosed, CallFailed or TimeoutError."""
        self._number += 1
        number = self._number
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._send(_Frame("call", number, name, msgspec.msgpack.encode(argument)))
            async with asyncio.timeout(timeout_s):
                return await waiting
        finally:
            del self._waiting[number]

    def tell(self, name: str, argument: Any = None) -> None:
        """Call without an answer; nothing happens where the other side is gone."""
        if self._writer is not None:
            self._send(_Frame("call", 0, name, msgspec.msgpack.encode(argument)))

    async def _answer(self, frame: _Frame) -> None:
        try:
            answer = _Frame("answer", frame.number, "", await self._handlers[frame.name](frame.body))
        except Exception as error:  # the caller is told, and what it calls for must not end the channel
            logger.exception("a call for %s from the other process failed", frame.name)
            answer = _Frame("fault", frame.number, f"{type(error).__name__}: {error}", b"")
        if frame.number and self._writer is not None:
            self._send(answer)

    def _send(self, frame: _Frame) -> None:
        if self._writer is None:
            raise ChannelClosed("the other side is gone")
        data = msgspec.msgpack.encode(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)
