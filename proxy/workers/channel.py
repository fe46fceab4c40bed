"""Calls in both directions between a worker and its parent, over one link."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from epd_serve.rpc.link import AsyncLink, LinkClosed

logger = logging.getLogger(__name__)

#: Answers a call; its argument and its answer are MessagePack.
Handler = Callable[[bytes], Awaitable[bytes]]

NOTHING = msgspec.msgpack.encode(None)


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    kind: Literal["call", "answer", "fault"]
    number: int
    name: str
    body: bytes


_FRAMES: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


class CallFailed(Exception):
    """The other side could not answer; its log says more."""


class Channel:
    """Both sides trust each other: they are one program. A call that fails there is logged there.

    Args:
        handlers: what the other side may call, by name.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._link: AsyncLink[_Frame] | None = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def open(self, end: socket.socket) -> None:
        """Take over a socket; :meth:`run` must follow."""
        self._link = await AsyncLink.over(end, _FRAMES)

    async def run(self) -> None:
        """Serve and be served until the other side closes."""
        link = self._link
        assert link is not None, "open() comes first"
        try:
            async with asyncio.TaskGroup() as answering:
                while True:
                    try:
                        frame = await link.receive()
                    except LinkClosed:
                        return
                    if frame.kind == "call":
                        answering.create_task(self._answer(frame))
                    elif (waiting := self._waiting.get(frame.number)) is not None and not waiting.done():
                        if frame.kind == "answer":
                            waiting.set_result(frame.body)
                        else:
                            waiting.set_exception(CallFailed(frame.name))
        finally:
            self._link = None
            link.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(LinkClosed("the other side is gone"))

    async def call(self, name: str, argument: Any = None, *, timeout_s: float) -> bytes:
        """The answer. Raises LinkClosed, CallFailed or TimeoutError."""
        self._number += 1
        number = self._number
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            if self._link is None:
                raise LinkClosed("the other side is gone")
            self._link.send(_Frame("call", number, name, msgspec.msgpack.encode(argument)))
            async with asyncio.timeout(timeout_s):
                return await waiting
        finally:
            del self._waiting[number]

    def tell(self, name: str, argument: Any = None) -> None:
        """Call without an answer; nothing happens where the other side is gone."""
        if self._link is not None:
            self._link.send(_Frame("call", 0, name, msgspec.msgpack.encode(argument)))

    async def _answer(self, frame: _Frame) -> None:
        try:
            answer = _Frame("answer", frame.number, "", await self._handlers[frame.name](frame.body))
        except Exception as error:  # the caller is told, and what it calls for must not end the channel
            logger.exception("a call for %s from the other process failed", frame.name)
            answer = _Frame("fault", frame.number, f"{type(error).__name__}: {error}", b"")
        if frame.number and self._link is not None:
            try:
                self._link.send(answer)
            except ValueError as error:  # it is too long: the caller is told, and the channel goes on
                self._link.send(_Frame("fault", frame.number, str(error), b""))
