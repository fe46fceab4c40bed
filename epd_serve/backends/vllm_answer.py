"""Calls to a vLLM server, and their answers as the gateway reads them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import msgspec

from epd_serve.errors import InstanceFailed, InstanceLost, InvalidRequest, Overloaded, ServeError, Unavailable
from epd_serve.protocol.wire import REQUEST_ID_HEADER, write_prompt_note
from epd_serve.rpc.http import HttpServer
from epd_serve.rpc.link import MAX_BODY_BYTES

_ERROR = b'data: {"error"'
#: Words of a 500 by which vLLM means that the model's chat template has no place for an item of that modality.
_NO_PLACE = re.compile(r"Failed to apply prompt replacement for mm_items\['(\w+)'\]")
DATA = b"data: "
END_OF_EVENT = b"\n\n"
DONE = b"[DONE]"


class VllmError(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _Envelope(msgspec.Struct):
    error: VllmError


def error_of(status: int, body: bytes, name: str) -> ServeError:
    """An error answer of vLLM as ours; its own 5xx are failures of the instance, which another may not have."""
    try:
        told = msgspec.json.decode(body, type=_Envelope).error
    except msgspec.MsgspecError:
        told = VllmError(body[:200].decode("utf-8", "replace") or "nothing")
    if status in (429, 503):
        return (Overloaded if status == 429 else Unavailable)(told.message, param=told.param)
    if status < 500:
        return InvalidRequest(told.message, param=told.param)
    if placeless := _NO_PLACE.search(told.message):
        return InvalidRequest(f"the chat template of this model has no place for media of the kind {placeless[1]}")
    return InstanceFailed(f"instance {name} answered {status}: {told.message}")


class VllmCall:
    """An HTTP call, and the Answer that it opens with: OpenAI's bytes without a word on tokens.

    Attributes:
        opened: as of :class:`epd_serve.backends.base.StageCall`, once it is sent.
    """

    framed = False
    decode_follows = False
    prompt_note = ""
    #: What has to be put right in each object on its way: choices' index and the answer's id.
    rewrite: Callable[[dict[str, Any]], None] | None = None
    opened: asyncio.Task[VllmCall]
    _answer: aiohttp.ClientResponse | None = None
    #: The beginning of an event whose end has not come yet.
    _rest = b""
    _closed = False

    def __init__(
        self, server: HttpServer, path: str, body: dict[str, Any] | None = None, request_id: str = ""
    ) -> None:
        self.server = server
        self._path = path
        self._body = b"" if body is None else msgspec.json.encode(body)
        self._headers = {"content-type": "application/json", REQUEST_ID_HEADER: request_id}

    def send(self) -> None:
        """Send the call."""
        self.opened = asyncio.create_task(self._open())
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # nobody has to ask

    async def _open(self) -> VllmCall:
        answer = self._answer = await self.server.send(
            "POST" if self._body else "GET", self._path, self._body, self._headers
        )
        if self._closed:
            answer.close()
        if answer.status >= 400:
            raise error_of(answer.status, await self.server.read_error(answer), self.server.name)
        return self

    async def ask(self) -> bytes:
        """Send the call, return the whole body and close the call. Raises ServeError."""
        try:
            self.send()
            await self.opened
            return await self._whole()
        finally:
            self.close()

    def close(self) -> None:
        """Break the call off unless its answer has been read to the end. Idempotent."""
        self._closed = True
        if hasattr(self, "opened"):
            self.opened.cancel()
        if self._answer is not None:
            self._answer.close()

    async def _whole(self) -> bytes:
        assert self._answer is not None
        body = bytearray()
        while chunk := await self.server.read(self._answer):
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise InstanceLost(f"instance {self.server.name} answered with more than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._answer is not None
        if self.rewrite is not None:
            yield self._rewritten(await self._whole())
            return
        while chunk := await self.server.read(self._answer):
            yield chunk

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Forward whole events; the events before an error event are written first."""
        assert self._answer is not None
        while chunk := await self.server.read(self._answer):
            *events, self._rest = (self._rest + chunk).split(END_OF_EVENT)
            passed = bytearray()
            for event in events:
                if event.startswith(_ERROR):
                    if passed:
                        write(bytes(passed))
                        passed.clear()
                    passed += self.failed(event)
                else:
                    passed += self.passed(event)
            if passed and not write(bytes(passed)):
                return False
        if self._rest.strip():
            raise InstanceFailed(f"instance {self.server.name} ended its answer in the middle of an event")
        return True

    def passed(self, event: bytes) -> bytes:
        """The bytes to pass on for an event, which comes without its end. Raises InstanceFailed."""
        told = event.removeprefix(DATA)
        if self.rewrite is not None and told.strip() != DONE:
            event = DATA + self._rewritten(told)
        return event + END_OF_EVENT

    def failed(self, event: bytes) -> bytes:
        """The bytes to pass on for an error event. Raises InstanceFailed where the event reports it."""
        raise error_of(500, event.removeprefix(DATA), self.server.name)

    def _rewritten(self, data: bytes) -> bytes:
        assert self.rewrite is not None
        try:
            answer = msgspec.json.decode(data)
            self.rewrite(answer)
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise InstanceFailed(f"instance {self.server.name} gave an unreadable answer ({error})") from error
        return msgspec.json.encode(answer)


class PrefillAnswer:
    """P's answer: P has computed the prompt, and the answer's text comes from D. The body is empty."""

    framed = True
    decode_follows = True
    prompt_note = ""

    def __init__(self, num_prompt_tokens: int | None = None, num_cached: int = 0) -> None:
        if num_prompt_tokens is not None:
            self.prompt_note = write_prompt_note(num_prompt_tokens, (), num_cached)

    async def chunks(self) -> AsyncIterator[bytes]:
        chunks: tuple[bytes, ...] = ()
        for chunk in chunks:
            yield chunk

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        return True


class Work:
    """A stage call (:class:`epd_serve.backends.base.StageCall`) whose answer takes more than one step to get.

    ``steps`` may open HTTP calls; they are closed with this one if they are given to ``holds``.
    """

    def __init__(
        self, steps: Callable[[Work], Coroutine[Any, Any, Any]], on_close: Callable[[], None] = lambda: None
    ) -> None:
        self._held: list[VllmCall] = []
        self._on_close = on_close
        self._closed = False
        self.opened: asyncio.Future[Any] = asyncio.get_running_loop().create_task(steps(self))
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # nobody has to ask

    def holds(self, call: VllmCall) -> None:
        if self._closed:
            call.close()
        else:
            self._held.append(call)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.opened.cancel()
        for call in self._held:
            call.close()
        self._on_close()
