"""Calls to a vLLM server, and their answers for the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import msgspec

from epd_serve.errors import InstanceFailed, InstanceLost, InvalidRequest, Overloaded, ServeError, Unavailable
from epd_serve.protocol.wire import REQUEST_ID_HEADER, PromptNote
from epd_serve.rpc.http import HttpServer
from epd_serve.rpc.link import MAX_BODY_BYTES

_ERROR = b'data: {"error"'
#: vLLM's 500 for a chat template without a place for an item's modality.
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
    """Convert an error answer of vLLM; most 5xx are failures of the instance that others may not have."""
    try:
        error = msgspec.json.decode(body, type=_Envelope).error
    except ValueError:  # also invalid UTF-8
        error = VllmError(body[:200].decode("utf-8", "replace") or "nothing")
    if status in (429, 503):
        return (Overloaded if status == 429 else Unavailable)(error.message, param=error.param)
    if status < 500:
        return InvalidRequest(error.message, param=error.param)
    if unplaced := _NO_PLACE.search(error.message):
        return InvalidRequest(f"the chat template of this model does not support {unplaced[1]} items")
    return InstanceFailed(f"instance {name} answered {status}: {error.message}")


class VllmCall:
    """An HTTP call (:class:`epd_serve.backends.base.StageCall`) and its Answer, OpenAI's bytes without tokens."""

    framed = False
    decode_follows = False
    prompt_note = ""
    #: Corrects each object of the answer: indices and usage.
    rewrite: Callable[[dict[str, Any]], None] | None = None
    opened: asyncio.Task[VllmCall]
    _answer: aiohttp.ClientResponse | None = None
    #: Beginning of an incomplete event.
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
        self.opened = asyncio.create_task(self._open())
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # retrieved

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
        """Return the whole body. Raises ServeError."""
        try:
            self.send()
            await self.opened
            return await self._whole()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the call unless its answer is complete. Idempotent."""
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
        """Return the bytes to forward for an event without its final line feeds. Raises InstanceFailed."""
        data = event.removeprefix(DATA)
        if self.rewrite is not None and data.strip() != DONE:
            event = DATA + self._rewritten(data)
        return event + END_OF_EVENT

    def failed(self, event: bytes) -> bytes:
        """Return the bytes to forward for an error event, or raise its error."""
        raise error_of(500, event.removeprefix(DATA), self.server.name)

    def _rewritten(self, data: bytes) -> bytes:
        assert self.rewrite is not None
        try:
            answer = msgspec.json.decode(data)
            self.rewrite(answer)
        except (ValueError, LookupError, TypeError) as error:
            raise InstanceFailed(f"instance {self.server.name} gave an unreadable answer ({error})") from error
        return msgspec.json.encode(answer)


class PrefillAnswer:
    """P's empty answer after the prefill: the text comes from D."""

    framed = True
    decode_follows = True
    prompt_note = ""

    def __init__(self, num_prompt_tokens: int | None = None, num_cached: int = 0) -> None:
        if num_prompt_tokens is not None:
            self.prompt_note = msgspec.json.encode(PromptNote(num_prompt_tokens, [], num_cached)).decode()

    async def chunks(self) -> AsyncIterator[bytes]:
        chunks: tuple[bytes, ...] = ()
        for chunk in chunks:
            yield chunk

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        return True


class Work:
    """A stage call (:class:`epd_serve.backends.base.StageCall`) of several HTTP calls.

    ``steps`` passes them to :meth:`own`, which closes them with this call.
    """

    def __init__(
        self, steps: Callable[[Work], Coroutine[Any, Any, Any]], on_close: Callable[[], None] = lambda: None
    ) -> None:
        self._calls: list[VllmCall] = []
        self._on_close = on_close
        self._closed = False
        self.opened: asyncio.Future[Any] = asyncio.get_running_loop().create_task(steps(self))
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # retrieved

    def own(self, call: VllmCall) -> None:
        if self._closed:
            call.close()
        else:
            self._calls.append(call)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.opened.cancel()
        for call in self._calls:
            call.close()
        self._on_close()
