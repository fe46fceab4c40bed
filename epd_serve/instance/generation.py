"""The answer of a request while this instance decodes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from epd_serve.engine.engine import Engine
from epd_serve.engine.events import EngineEvent, FailureEvent, TokenEvent
from epd_serve.errors import ServeError
from epd_serve.instance.answer import Answer
from epd_serve.instance.http import JSON, BrokenStream, Header, Reply
from epd_serve.protocol import chunks, frames
from epd_serve.request import Sequence


class Generation:
    """Turns engine events into an OpenAI answer, streamed or whole; ``on_finished`` is told of the last token.

    Attributes:
        answer: as far as it has come.
        can_move: whether another instance can go on with it, or begin it anew.
    """

    def __init__(self, answer: Answer, engine: Engine, on_finished: Callable[[], None] = lambda: None) -> None:
        self.can_move = answer.can_move
        self.answer = answer
        self._engine = engine
        self._on_finished = on_finished
        self._pieces: asyncio.Queue[bytes | ServeError | None] = asyncio.Queue()

    def feed(self, event: EngineEvent) -> None:
        if isinstance(event, FailureEvent):
            self._pieces.put_nowait(event.error)
        elif isinstance(event, TokenEvent):
            self._feed_token(event)

    def fail(self, error: ServeError) -> None:
        self.can_move = False  # whoever reads it knows what to do
        self._pieces.put_nowait(error)

    def _feed_token(self, event: TokenEvent) -> None:
        answer, index = self.answer, event.sequence.index
        if answer.is_finished(index):
            return  # computed before the engine knew of the stop string
        try:
            check_constraint(event.sequence)
        except ServeError as error:
            self._pieces.put_nowait(error)
            return
        if event.logprobs:
            answer.learn(event.logprobs)
        self._pieces.put_nowait(answer.push(index, event.token.token_id, event.token.logprob, event.finish_reason))
        if answer.is_finished(index) and event.finish_reason is None:
            self._engine.stop_sequence(event.sequence)
        if answer.finished:
            self._on_finished()
            self._pieces.put_nowait(answer.end())
            self._pieces.put_nowait(None)

    async def reply(
        self, *, stream: bool, on_close: Callable[[], None], headers: tuple[Header, ...] = ()
    ) -> Reply:
        """The answer; a failure before its first byte is raised as what it is."""
        if not stream:
            body = b"".join([piece async for piece in self._take()])
            return Reply(headers=(JSON, *headers), body=body, on_close=on_close)
        pieces = self._take()
        first = await anext(pieces)
        return Reply(headers=(*frames.HEADERS, *headers), stream=_guarded(first, pieces), on_close=on_close)

    async def _take(self) -> AsyncGenerator[bytes, None]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, ServeError):
                raise piece
            yield piece


def check_constraint(sequence: Sequence) -> None:
    """Raise ServeError where the grammar of an answer could not be followed."""
    if sequence.constraint is not None and sequence.constraint.error:
        raise ServeError(f"the answer's structure could not be kept to: {sequence.constraint.error}")


async def _guarded(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """An error after the first byte becomes an error frame and a cut connection, never a clean end."""
    yield first
    try:
        async for piece in rest:
            yield piece
    except ServeError as error:
        yield frames.pack(frames.ERROR, (), chunks.event(error.body()))
        raise BrokenStream(error.message) from error
