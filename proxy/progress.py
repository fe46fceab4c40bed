"""How far a streamed answer has got at its client, so that another instance can go on with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from epd_serve.errors import ErrorBody, ErrorEnvelope, InstanceFailed
from epd_serve.protocol.frames import FrameError, FrameReader, num_tokens, token_ids

#: Takes an answer's bytes as they come; returns the whole events among them.
Reader = Callable[[bytes], bytes]

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
        resumable: whether all tokens that were sent to the client are known, so that another instance can go on.
        complete: whether the answer has come to its end.
        failure: what came behind the events that were read last, in place of more of them.
    """

    __slots__ = ("_readers", "complete", "failure", "resumable")

    def __init__(self, num_choices: int) -> None:
        self._readers: list[FrameReader] = []
        self.resumable = num_choices == 1
        self.complete = False
        self.failure: InstanceFailed | None = None

    @property
    def num_tokens(self) -> int:
        """Of the output, over all choices, as far as it came in frames."""
        return sum([num_tokens(reader.labels) for reader in self._readers])

    def tokens(self) -> list[int]:
        """Their ids."""
        return [token for reader in self._readers for token in token_ids(reader.labels)]

    def reader(self, *, framed: bool) -> Reader:
        """For the body of one instance's answer. A piece of an event is forgotten with its reader."""
        self.failure = None
        if framed:
            frames = FrameReader()
            self._readers.append(frames)
            return _Frames(self, frames).read
        self.resumable = False
        return _PlainEvents(self).read


class _Frames:
    __slots__ = ("_frames", "_progress")

    def __init__(self, progress: Progress, frames: FrameReader) -> None:
        self._frames = frames
        self._progress = progress

    def read(self, chunk: bytes) -> bytes:
        frames, progress = self._frames, self._progress
        try:
            events = frames.read(chunk)
        except FrameError as error:
            progress.failure = InstanceFailed(f"an instance's answer cannot be read: {error}")
            return b""
        if frames.ended:
            progress.complete = True
        elif frames.error is not None:
            progress.failure = _broke(frames.error)
        return events


class _PlainEvents:
    """Server-sent events without their tokens. What follows the last empty line waits for its event's rest."""

    __slots__ = ("_pending", "_progress")

    def __init__(self, progress: Progress) -> None:
        self._pending = b""
        self._progress = progress

    def read(self, chunk: bytes) -> bytes:
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
