"""Answers that go on at another decode instance with their KV, because this one leaves its role.

An answer is broken off between two tokens with the code ``kv_held``, and its blocks stay for a while. A gateway
that names another decode instance (``/stage/move``) has this one do what a prefill instance does for a prompt:
reserve there, write, hand over. All that sampling depends on are the tokens, which go with the hand-over. Where
any of it does not work out, the gateway has the tokens so far prefilled again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from epd_serve.engine.engine import Engine
from epd_serve.errors import DRAINING, KV_HELD, InstanceFailed, InvalidRequest, ServeError, Unavailable
from epd_serve.instance.answer import Generation
from epd_serve.instance.calls import Refusals, left, moved
from epd_serve.instance.http import Reply
from epd_serve.instance.kv_delivery import Deliveries, PushDelivery
from epd_serve.instance.prefill import NEXT_DECODE
from epd_serve.protocol import frames, wire
from epd_serve.protocol.openai import chunks
from epd_serve.rpc.streams import BrokenStream
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import KVSender

#: A gateway asks at once, if it still wants the answer.
_UNCLAIMED_S = 5.0


@dataclass(slots=True)
class _Held:
    """An answer that is broken off. ``sequence`` is None as long as a step uses its blocks."""

    generation: Generation
    deadline_s: float
    sequence: Sequence | None = None


@dataclass(slots=True)
class _Move:
    sequence: Sequence
    delivery: PushDelivery
    handoff: wire.Handoff
    is_over: bool = False


class Migrations:
    """The answers of one instance that leaves. It belongs to the event loop.

    Args:
        deliver: how KV gets to decode instances.
        spawn: runs a clean-up in the background, owned by the instance.

    Attributes:
        held: what is broken off with its KV, or about to be.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        sender: KVSender,
        deliver: Deliveries,
        *,
        loop: asyncio.AbstractEventLoop,
        spawn: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._sender = sender
        self._deliver = deliver
        self._loop = loop
        self._spawn = spawn
        self.held: dict[str, _Held] = {}
        self._moves = Refusals(name)

    def holds(self, request_id: str) -> bool:
        """Whether an answer is broken off with its KV, or about to be."""
        return request_id in self.held

    def send_away(self, generations: Mapping[str, Generation], *, late: bool) -> None:
        """Break off what can go on elsewhere; ``late``: without its KV, of what is on its way as well."""
        if late:
            self._moves.refuse(begun=True)
            for request_id in list(self.held):
                self._drop(request_id)
        for request_id, generation in generations.items():
            if not generation.can_move or request_id in self.held:
                continue
            if late or not self._hold(request_id, generation):
                generation.fail(moved(self._name))

    def expire(self) -> None:
        """Give back what nobody has asked for."""
        now = time.monotonic()
        for request_id in [name for name, held in self.held.items() if held.deadline_s <= now]:
            self._drop(request_id)

    async def move(self, request: wire.MoveRequest) -> Reply:
        """Hand an answer over; the reply is complete when the other instance has it.

        Raises Unavailable where there is no such answer, its client lacks some of it, or the other can never take
        it, else as the other answers.
        """
        held = self.held.pop(request.held_id, None)
        if held is None or held.sequence is None:
            raise left(self._name)
        sequence = held.sequence
        if request.num_generated not in (None, len(sequence.output_ids)):
            # P's first token may still be on its way to the gateway, and the other would not give it again
            self._engine.transferred(sequence)
            raise left(self._name)
        # the KV of all tokens but the last is there, as it is of a prompt behind its first token
        *generated, last = sequence.output_ids
        delivery = self._deliver(sequence, len(generated), request.decode_url, request_id=request.request_id)
        handoff = delivery.handoff(generated, [wire.FirstToken(last)], held.generation.answer)
        try:
            async with self._moves.call(lambda: True):
                longest = len(sequence.prompt_ids) + sequence.max_tokens
                if request.max_model_len is not None and longest > request.max_model_len:
                    raise InvalidRequest(f"{longest} tokens are more than {request.decode_url} takes")
                await delivery.open(lambda event: None)
        except BaseException as error:
            self._engine.transferred(sequence)
            if isinstance(error, InvalidRequest):  # nothing is wrong with it
                raise Unavailable(error.message, code=DRAINING) from error
            raise
        move = _Move(sequence, delivery, handoff)
        if delivery.transfer.target is not None:
            delivery.send_all(handoff)
        return Reply(
            headers=(*(frames.HEADERS if handoff.output.stream else ()), NEXT_DECODE),
            stream=self._hand_over(move),
            on_close=lambda: self._give_up(move),
        )

    def _hold(self, request_id: str, generation: Generation) -> bool:
        """Whether the answer's KV can stay."""
        if len(generation.answer.choices) > 1 or not self._engine.hold(
            request_id, partial(self._keep_on_loop, request_id, generation)
        ):
            return False
        self.held[request_id] = _Held(generation, time.monotonic() + _UNCLAIMED_S)
        return True

    def _keep_on_loop(self, request_id: str, generation: Generation, sequence: Sequence) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._keep, request_id, generation, sequence)

    def _keep(self, request_id: str, generation: Generation, sequence: Sequence) -> None:
        """No step uses the sequence any more, and all of its tokens are out."""
        held = self.held.get(request_id)
        if held is None or generation.answer.finished:  # too late, or a stop string was found meanwhile
            self.held.pop(request_id, None)
            self._engine.transferred(sequence)
            generation.fail(moved(self._name))
            return
        held.sequence = sequence
        held.deadline_s = time.monotonic() + _UNCLAIMED_S
        generation.fail(InstanceFailed(f"instance {self._name} is leaving its role", code=KV_HELD))

    def _drop(self, request_id: str) -> None:
        held = self.held.pop(request_id)
        if held.sequence is not None:
            self._engine.transferred(held.sequence)

    async def _hand_over(self, move: _Move) -> AsyncGenerator[bytes, None]:
        yield b""
        try:
            async with self._moves.call(lambda: True):
                await move.delivery.hand_over(move.handoff)
        except ServeError as error:
            self._give_up(move)
            if move.handoff.output.stream:
                yield frames.pack(frames.ERROR, (), chunks.event(error.body()))
            raise BrokenStream(error.message) from error
        move.is_over = True
        self._engine.transferred(move.sequence)

    def _give_up(self, move: _Move) -> None:
        """Stop writing, then tell the other instance so. Idempotent."""
        if move.is_over:
            return
        move.is_over = True
        move.delivery.stop()
        self._sender.fence(move.delivery.transfer, partial(self._engine.transferred, move.sequence))
        self._spawn(asyncio.create_task(move.delivery.withdraw("")))
