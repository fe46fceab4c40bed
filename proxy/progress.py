"""How far a streamed answer has got at its client, so that another instance can go on with it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from epd_serve.errors import ErrorBody, ErrorEnvelope, InstanceFailed
from epd_serve.protocol.frames import END, ERROR, FrameError, FrameReader, skim

Events = bytes | memoryview
#: Takes an answer's bytes as they come; returns the whole events among them.
Reader = Callable[[bytes], Events]

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


class Progress:
    """What was read of an answer, over all instances that gave a part of it.

    Attributes:
        tokens: ids of the output tokens read, where the answer has one choice.
        resumable: whether these are all that were sent to the client, so that another instance can go on.
        complete: whether the answer has come to its end.
        failure: what came behind the events that were read last, in place of more of them.
    """

    __slots__ = ("complete", "failure", "resumable", "tokens")

    def __init__(self, num_choices: int) -> None:
        self.tokens = array("I")
        self.resumable = num_choices == 1
        self.complete = False
        self.failure: InstanceFailed | None = None

    def reader(self, *, framed: bool) -> Reader:
        """For the body of one instance's answer. A piece of an event is forgotten with its reader."""
        self.failure = None
        if framed:
            return _Frames(self).read
        self.resumable = False
        return _PlainEvents(self).read


class _Frames:
    __slots__ = ("_frames", "_progress")

    def __init__(self, progress: Progress) -> None:
        self._frames = FrameReader()
        self._progress = progress

    def read(self, chunk: bytes) -> Events:
        progress = self._progress
        pieces: list[Events] = []
        if self._frames.is_between_frames:
            skimmed, tokens, start = skim(chunk)
            progress.tokens.frombytes(b"".join(tokens))
            if start == len(chunk):
                return b"".join(skimmed)
            pieces += skimmed
            chunk = chunk[start:]
        try:
            for choice, token_ids, events in self._frames.feed(chunk):
                if choice == ERROR:
                    progress.failure = _broke(bytes(events))
                    break
                if token_ids:
                    progress.tokens.frombytes(token_ids)
                if choice == END:
                    progress.complete = True
                pieces.append(events)
        except FrameError as error:
            progress.failure = InstanceFailed(f"an instance's answer cannot be read: {error}")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _PlainEvents:
    """Server-sent events without their tokens. What follows the last empty line waits for its event's rest."""

    __slots__ = ("_pending", "_progress")

    def __init__(self, progress: Progress) -> None:
        self._pending = b""
        self._progress = progress

    def read(self, chunk: bytes) -> Events:
        if self._pending:
            chunk = self._pending + chunk
            self._pending = b""
        if not chunk.endswith(_END_OF_EVENT):
            end = chunk.rfind(_END_OF_EVENT)
            end = 0 if end < 0 else end + len(_END_OF_EVENT)
            chunk, self._pending = chunk[:end], chunk[end:]
        if chunk:
            self._progress.complete = chunk.endswith(_DONE) and not self._pending
            start = chunk.rfind(_END_OF_EVENT, 0, -len(_END_OF_EVENT))
            last = 0 if start < 0 else start + len(_END_OF_EVENT)
            if _ERROR.match(chunk, last):
                self._progress.failure = _broke(chunk[last:])
                return chunk[:last]
        return chunk


def _broke(event: bytes) -> InstanceBroke:
    try:
        error = msgspec.json.decode(event.removeprefix(b"data:"), type=ErrorEnvelope).error
    except msgspec.MsgspecError:
        error = ErrorBody(message="the instance broke off its answer", type=InstanceFailed.type)
    return InstanceBroke(error)
