"""Answers of vLLM servers, as the gateway forwards them.

Streams of one choice have known tokens, so that another instance can continue a broken stream: vLLM returns the
tokens of each event (``return_token_ids``) and takes a prompt as tokens, the request's followed by the answer's
that the client has (:class:`KnownTokens`). An answer that depends on more than its tokens is computed again as a
whole; the part that the client has is compared and dropped (:class:`ReplayedTokens`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from epd_serve.errors import InstanceFailed, InstanceLost, InvalidRequest, Overloaded, ServeError, Unavailable
from epd_serve.protocol.wire import PrefillRequest, PromptNote
from epd_serve.rpc.http import HttpServer
from epd_serve.rpc.items import END, ERROR, pack
from epd_serve.rpc.link import MAX_BODY_BYTES

_DATA, _END_OF_EVENT, _DONE = b"data: ", b"\n\n", b"[DONE]"
_ERROR = b'data: {"error"'
#: vLLM's 500 for a chat template without a place for an item's modality.
_NO_PLACE = re.compile(r"Failed to apply prompt replacement for mm_items\['(\w+)'\]")
#: Most events held back until one has the text of a single token. For a reader that always lags, vLLM merges
#: tokens in every event; a character may be cut if the instance is lost just then.
_MOST_HELD = 8


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _Envelope(msgspec.Struct):
    error: _Error


def error_of(status: int, body: bytes, name: str) -> ServeError:
    """Convert an error answer of vLLM; most 5xx are failures of the instance that others may not have."""
    try:
        error = msgspec.json.decode(body, type=_Envelope).error
    except ValueError:  # also invalid UTF-8
        error = _Error(body[:200].decode("utf-8", "replace") or "nothing")
    if status in (429, 503):
        return (Overloaded if status == 429 else Unavailable)(error.message, param=error.param)
    if status < 500:
        return InvalidRequest(error.message, param=error.param)
    if unplaced := _NO_PLACE.search(error.message):
        return InvalidRequest(f"the chat template of this model does not support {unplaced[1]} items")
    return InstanceFailed(f"instance {name} answered {status}: {error.message}")


@dataclass(eq=False, slots=True)
class Correction:
    """Differences between a client's answer and vLLM's.

    Attributes:
        copies, first_index: choices for each of vLLM's, and the index of the first one.
        num_cached: prompt tokens in P's prefix cache, as D got all KV from P; None: D's own count is right.
    """

    copies: int = 1
    first_index: int = 0
    num_cached: int | None = None

    def apply(self, answer: dict[str, Any]) -> None:
        """Correct an answer or event in place."""
        usage = answer.get("usage")
        if self.copies > 1 or self.first_index:
            answer["choices"] = [
                {**choice, "index": self.first_index + choice["index"] + copy}
                for copy in range(self.copies)
                for choice in answer.get("choices", ())
            ]
            if usage:
                usage["completion_tokens"] *= self.copies
                usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        if usage and self.num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.num_cached, usage["prompt_tokens"])}


class Events:
    """Packs the events of an answer into items (:mod:`epd_serve.rpc.items`); only a correction parses them.

    Attributes:
        name: the instance's, for errors.
        knows_tokens: whether the items contain the tokens of their events.
    """

    knows_tokens = False

    def __init__(self, name: str, correction: Correction | None = None) -> None:
        self.name = name
        self.correction = correction

    def passed(self, event: bytes) -> bytes:
        """Return the bytes to forward for an event without its final line feeds. Raises InstanceFailed."""
        data = event.removeprefix(_DATA)
        if data.strip() == _DONE:
            return pack(END, (), event + _END_OF_EVENT)
        if self.correction is not None:
            event = _DATA + self.corrected(data)
        return pack(0, (), event + _END_OF_EVENT)

    def failed(self, event: bytes) -> bytes:
        """Return the bytes to forward for an error event, or raise its error."""
        raise error_of(500, event.removeprefix(_DATA), self.name)

    def corrected(self, data: bytes) -> bytes:
        """Return a corrected answer or event. Raises InstanceFailed."""
        if self.correction is None:
            return data
        try:
            answer = msgspec.json.decode(data)
            self.correction.apply(answer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.unreadable(error) from error
        return msgspec.json.encode(answer)

    def unreadable(self, error: Exception) -> InstanceFailed:
        return InstanceFailed(f"instance {self.name} gave an unreadable answer ({error})")


class TokenEvents(Events):
    """Packs the events of an answer into items with their tokens.

    Args:
        prompt: in tokens, for the rest of an answer: the request's prompt and the tokens generated before.
    """

    knows_tokens = True
    _has_ended = False
    _pending = b""

    def __init__(
        self, name: str, correction: Correction, request: PrefillRequest, prompt: list[int] | None = None
    ) -> None:
        super().__init__(name)
        self._usage = correction
        self._prompt, self._generated, self._created = prompt, request.generated, request.output.created
        self._tokens: list[int] = []
        self._num_before = 0 if prompt is None else len(request.generated)

    def failed(self, event: bytes) -> bytes:
        return pack(ERROR, (), event + _END_OF_EVENT)

    def passed(self, event: bytes) -> bytes:
        data = event.removeprefix(_DATA)
        if data.strip() == _DONE:
            return pack(END, self._tokens, self._pending + event + _END_OF_EVENT)
        try:
            answer = msgspec.json.decode(data)
            choice = (answer.get("choices") or [{}])[0]
            tokens = choice.get("token_ids") or []
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            text = (choice.get("delta") or choice).get("content", choice.get("text"))
            self._make_whole(answer, choice)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise self.unreadable(error) from error
        is_last = bool(choice.get("finish_reason"))
        if not self._is_new(tokens, prompt, has_choice=bool(choice), is_last=is_last):
            return b""
        self._tokens += tokens
        self._pending += _DATA + msgspec.json.encode(answer) + _END_OF_EVENT
        self._has_ended = self._has_ended or is_last  # an ended answer is not continued
        if self._has_ended or self._waits(tokens, text):
            return b""
        frame = pack(0, self._tokens, self._pending)
        self._tokens, self._pending = [], b""
        return frame

    def _make_whole(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        """Make an event look like one of an unbroken answer, without token ids."""
        answer["created"] = self._created
        for one in (answer, choice):
            for name in ("token_ids", "prompt_token_ids"):
                if name in one:
                    one[name] = None
        if usage := answer.get("usage"):
            usage["prompt_tokens"] -= self._num_before
            usage["completion_tokens"] += self._num_before
            self._usage.apply(answer)

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        """Return whether the client lacks an event. Raises InstanceFailed for a different answer."""
        raise NotImplementedError

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        """Return whether to hold an event back because no instance could continue after it."""
        raise NotImplementedError


class KnownTokens(TokenEvents):
    """An answer, or the rest of one, whose rest depends only on its tokens.

    Events wait for the next one with the text of a single token, as another instance must continue after a whole
    character. vLLM reports no partial characters, but for a lagging reader it merges tokens in an event, whose
    text may end before its last token.
    """

    _has_begun = False
    _num_held = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        if not self._has_begun:
            self._has_begun = True
            if self._prompt is not None and prompt != self._prompt:
                raise InstanceFailed(f"instance {self.name} does not take a prompt as tokens")
        is_opening = has_choice and not tokens and not is_last
        return not (self._num_before and is_opening)

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        if (text and len(tokens) == 1) or self._num_held >= _MOST_HELD:
            self._num_held = 0
            return False
        self._num_held += 1
        return True


class ReplayedTokens(TokenEvents):
    """A whole answer, computed again; the client has the events of the first ``generated`` tokens.

    vLLM returns the same events for the same tokens unless it merges some.
    """

    _num_read = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        begin, self._num_read = self._num_read, self._num_read + len(tokens)
        expected = self._generated[begin : self._num_read]
        if tokens[: len(expected)] != expected:
            raise InstanceFailed(f"instance {self.name} computes another answer than the first instance")
        if begin < len(self._generated) < self._num_read:
            raise InstanceFailed(f"instance {self.name} splits the answer into other events")
        if begin < len(self._generated) and (is_last or not has_choice):
            raise InstanceFailed(f"instance {self.name} computes a shorter answer than the first instance")
        return begin >= len(self._generated)

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        return not tokens


class VllmAnswer:
    """An open answer of a vLLM server (:class:`epd_serve.backends.base.Answer`)."""

    decode_follows = False
    prompt_note = ""
    #: Beginning of an incomplete event.
    _rest = b""

    def __init__(self, server: HttpServer, response: aiohttp.ClientResponse, events: Events) -> None:
        self._server, self._response, self._events = server, response, events
        self.knows_tokens = events.knows_tokens

    def close(self) -> None:
        """End the connection unless the answer is complete. Idempotent."""
        self._response.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        body = bytearray()
        while chunk := await self._server.read(self._response):
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise InstanceLost(f"instance {self._server.name} answered with more than {MAX_BODY_BYTES} bytes")
        yield self._events.corrected(bytes(body))

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Forward whole events; the events before an error event are written first."""
        while chunk := await self._server.read(self._response):
            *events, self._rest = (self._rest + chunk).split(_END_OF_EVENT)
            passed = bytearray()
            for event in events:
                if event.startswith(_ERROR):
                    if passed:
                        write(bytes(passed))
                        passed.clear()
                    passed += self._events.failed(event)
                else:
                    passed += self._events.passed(event)
            if passed and not write(bytes(passed)):
                return False
        if self._rest.strip():
            raise InstanceFailed(f"instance {self._server.name} ended its answer in the middle of an event")
        return True


class PrefillAnswer:
    """P's empty answer after the prefill: the text comes from D."""

    knows_tokens = True
    decode_follows = True
    prompt_note = ""

    def __init__(self, num_prompt_tokens: int | None = None, num_cached: int = 0) -> None:
        if num_prompt_tokens is not None:
            self.prompt_note = msgspec.json.encode(PromptNote(num_prompt_tokens, [], num_cached)).decode()

    def close(self) -> None:
        """Do nothing: the answer is complete."""

    async def chunks(self) -> AsyncIterator[bytes]:
        chunks: tuple[bytes, ...] = ()
        for chunk in chunks:
            yield chunk

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        return True
