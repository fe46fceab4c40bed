"""The progress of a streamed answer at its client, so that another instance can go on with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from epd_serve.errors import ErrorBody, ErrorEnvelope, InstanceFailed
from epd_serve.protocol.frames import FrameReader, num_tokens, token_ids, token_ids_of_each

_END_OF_EVENT = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERROR = re.compile(rb'data: ?\{ ?"error"')


class InstanceBroke(InstanceFailed):
    """An instance has sent an error event in place of the rest of its answer. It is alive."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message, param=error.param, code=error.code)
        self._error = error

    def body(self) -> dict[str, Any]:
        return {"error": msgspec.structs.asdict(self._error)}


class Reader(Protocol):
    """Takes one instance's answer apart. A piece of an event is forgotten with it.

    Attributes:
        ended: whether the answer has come to its end.
        error: the event that came in place of the rest of it.
    """

    ended: bool
    error: bytes | None

    def read(self, chunk: bytes) -> bytes:
        """Bytes as they come → the whole events among them. Raises FrameError for what cannot be read."""


class Progress:
    """The part of an answer that was read, over all instances that gave some of it.

    Attributes:
        known: whether all tokens that were sent to the client are, so that another instance can go on.
        complete: whether the answer has come to its end.
    """

    __slots__ = ("_before", "_num_choices", "_readers", "complete", "known")

    def __init__(self, num_choices: int, before: Sequence[int] = ()) -> None:
        """``before``: tokens that the client had already, of a single choice."""
        self._readers: list[FrameReader] = []
        self._num_choices = num_choices
        self._before = before
        self.known = True
        self.complete = False

    @property
    def framed(self) -> bool:
        """Whether all that came of it, and anything, came in frames."""
        return self.known and bool(self._readers)

    def num_tokens(self) -> int:
        """The tokens of the output, over all choices, as far as it came in frames."""
        return sum([num_tokens(reader.labels) for reader in self._readers])

    def tokens_of_each(self) -> list[list[int]]:
        """The ids of all that the client has, by choice; of several, one instance gave all."""
        labels = [text for reader in self._readers for text in reader.labels]
        if self._num_choices > 1:
            return token_ids_of_each(labels, self._num_choices)
        return [[*self._before, *token_ids(labels)]]

    def reader(self, *, framed: bool) -> Reader:
        """For the body of one instance's answer."""
        if framed:
            frames = FrameReader()
            self._readers.append(frames)
            return frames
        self.known = False
        return _PlainEvents()


class _PlainEvents:
    """Server-sent events without their tokens. What follows the last empty line waits for its event's rest."""

    __slots__ = ("_pending", "ended", "error")

    def __init__(self) -> None:
        self._pending = b""
        self.ended = False
        self.error: bytes | None = None

    def read(self, chunk: bytes) -> bytes:
        if self._pending:
            chunk = self._pending + chunk
            self._pending = b""
        if not chunk.endswith(_END_OF_EVENT):
            end = chunk.rfind(_END_OF_EVENT)
            end = 0 if end < 0 else end + len(_END_OF_EVENT)
            chunk, self._pending = chunk[:end], chunk[end:]
        if chunk:
            self.ended = chunk.endswith(_DONE) and not self._pending
            start = chunk.rfind(_END_OF_EVENT, 0, -len(_END_OF_EVENT))
            last = 0 if start < 0 else start + len(_END_OF_EVENT)
            if _ERROR.match(chunk, last):
                self.error = chunk[last:]
                return chunk[:last]
        return chunk


def broke(event: bytes) -> InstanceBroke:
    """Return the error for which :attr:`Reader.error` stands."""
    try:
        error = msgspec.json.decode(event.removeprefix(b"data:"), type=ErrorEnvelope).error
    except msgspec.MsgspecError:
        error = ErrorBody(message="the instance broke off its answer", type=InstanceFailed.type)
    return InstanceBroke(error)
