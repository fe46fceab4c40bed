"""Prefill stage: tokenize, receive features, reserve blocks at D, compute, send the first token, hand off."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent, PromptEvent
from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    PEER_UNREACHABLE,
    InstanceFailed,
    InvalidRequest,
    ServeError,
    Unavailable,
)
from epd_serve.instance.answer import Answer, Generation, broken_structure
from epd_serve.instance.calls import unreachable
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.text.request_processor import S_PER_CHARACTER
from epd_serve.protocol import wire
from epd_serve.protocol.openai import chunks
from epd_serve.rpc import items
from epd_serve.rpc.server import JSON, BrokenStream, Reply
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.telemetry.span import FEATURE_WAIT, PREFILL_QUEUE
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.transfer.transport import PeerGone, TransferError

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance
    from epd_serve.instance.loading.model import Language

_NEXT = wire.NEXT_HEADER.encode()
_NOTE = wire.PROMPT_NOTE_HEADER.encode()
_CANCEL_TIMEOUT_S = 5.0
NEXT_NONE = (_NEXT, b"none")
NEXT_DECODE = (_NEXT, b"decode")


@dataclass(eq=False, slots=True)
class _Prompt:
    """A request being served.

    Attributes:
        num_tokens: estimated number of prompt tokens.
        sequence: its sequence in the engine; None before it is submitted.
    """

    num_tokens: int
    sequence: Sequence | None = None


@dataclass(kw_only=True, eq=False)
class Prefiller:
    """Computes prompts, and decodes their answers if the gateway names no decode instance.

    Attributes:
        requests: running requests, by id.
    """

    instance: Instance
    weights: Language
    engine: Engine
    sender: KVSender
    receiver: FeatureReceiver

    def __post_init__(self) -> None:
        self.prompts, self._compiler = self.weights.prompts, self.weights.compiler
        self._processor, self._timeline = self.instance.processor, self.instance.telemetry.timeline
        self.requests: dict[str, _Prompt] = {}

    def has_begun(self, request_id: str) -> bool:
        """Return whether computation of the prompt has begun."""
        request = self.requests.get(request_id)
        sequence = None if request is None else request.sequence
        return sequence is not None and sequence.state is not SequenceState.WAITING

    async def prefill(self, request: wire.PrefillRequest) -> Reply:
        """Compute the prompt and return the answer as soon as the first token is there.

        A prompt waits for its features until the gateway ends the call. Raises InvalidRequest, or InstanceFailed
        if D is lost.
        """
        request_id = request.request_id
        if request_id in self.requests:
            raise InvalidRequest(f"request {request_id} is being served already", param="request_id")
        num_characters = self.prompts.check_size(request)
        self.requests[request_id] = _Prompt(self.prompts.estimate(request, num_characters))
        try:
            items = self.prompts.segments(request.items)
            here = self.receiver.expect(request_id, items)  # first, since features may be here already
            parts = (part for item in request.items for part in item.segments)
            had = [i for i, part in enumerate(parts) if part.mm_hash in here]
            stage = FEATURE_WAIT if len(had) < len(items) else PREFILL_QUEUE
            self._timeline.record_arrival(request_id, stage, hand_off=request.decode_url is not None)
            features = asyncio.create_task(self._receive_features(request_id, items))
            try:
                sequence, answer = await self._processor.run(
                    "text", S_PER_CHARACTER * num_characters, self._prepare, request
                )
                if self._compiler is not None:
                    # an instance that continues the answer enforces the same relaxed grammar
                    sequence.sampling, sequence.constraint = await self._compiler.constrain(sequence.sampling)
                if answer.finished:  # only the end is missing
                    reply = self._end_answer(sequence, answer, b"", partial(self._end, request_id))
                else:
                    num_new = 0 if sequence.hand_off else sequence.max_tokens - len(sequence.output_ids)
                    self.engine.check_fits(sequence.num_tokens, num_new, sequence.num_forked)
                    if request.decode_url is None:
                        generation = Generation(answer, self.engine, self._timeline, request_id)
                        await self._compute(sequence, generation)
                        end, is_streamed = partial(self._end, request_id), answer.options.stream
                        reply = await generation.reply(stream=is_streamed, headers=(NEXT_NONE,), on_close=end)
                    else:
                        reply = await self._hand_over(request.decode_url, sequence, answer)
                note = wire.PromptNote(len(sequence.prompt_ids), [*had], sequence.num_cached or 0)
                return replace(reply, headers=(*reply.headers, (_NOTE, msgspec.json.encode(note))))
            finally:
                features.cancel()
        except BaseException:
            self._end(request_id)
            raise

    def _prepare(self, request: wire.PrefillRequest) -> tuple[Sequence, Answer]:
        """Return the prompt's sequence, and the answer up to the tokens that the client has. Runs on a thread."""
        sequence = self.prompts.process(request)
        answer = Answer(self.prompts.tokenizer, request.output, sequence.sampling, sequence.prompt_ids)
        if generated := request.generated:
            reason = sequence.finish_reason(generated[-1], len(generated), self.engine.eos_token_ids)
            answer.replay(generated, reason)
        if sequence.sampling.logprobs is not None:
            sequence.wanted_logprobs = answer.unknown_logprobs
        return sequence, answer

    async def _receive_features(self, request_id: str, items: list[wire.MediaRef]) -> None:
        await self.receiver.complete(request_id, [item.mm_hash for item in items])
        self._timeline.record_features(request_id)

    async def _compute(self, sequence: Sequence, receiver: Generation | KVDelivery) -> None:
        """Submit a prompt; return at its first event."""
        self.engine.outbox.receivers[sequence.request_id] = receiver
        self.engine.submit(sequence, receiver if isinstance(receiver, KVDelivery) else None)
        self.requests[sequence.request_id].sequence = sequence
        await receiver.first
        self.receiver.release(sequence.request_id)

    async def _hand_over(self, decode_url: str, sequence: Sequence, answer: Answer) -> Reply:
        """Compute the prompt and hand the answer over to a decode instance.

        D reserves blocks and a place in its steps once the first step can compute: an encode may be slow.
        """
        item = self.engine.first_item(sequence) if sequence.spans else None
        if item is not None and not self.receiver.has(item.mm_hash):
            with self.engine.awaiting(item.mm_hash):
                await self.receiver.complete(sequence.request_id, [item.mm_hash])
        delivery = KVDelivery(self, sequence, decode_url)
        generated = list(sequence.output_ids)
        is_open = False
        try:
            await delivery.open()
            is_open = True
            await self._compute(sequence, delivery)
            tokens = delivery.first.result().tokens
            if sequence.constraint is not None and sequence.constraint.error:
                raise broken_structure(sequence.constraint.error)
            if sequence.logprobs:
                answer.learn(sequence.logprobs)
            answer.num_cached_tokens = sequence.num_cached or 0
            body = b"".join(
                answer.push(index, token.token_id, token.logprob, reason)
                for index, (token, reason) in enumerate(tokens)
            )
        except BaseException as error:
            # an invalid request is reported here only, since no instance has failed
            is_failure = is_open and isinstance(error, ServeError) and not isinstance(error, InvalidRequest)
            delivery.give_up(str(error) if is_failure else "")
            raise

        def close() -> None:
            delivery.close()
            self._end(sequence.request_id)

        if answer.finished:
            return self._end_answer(sequence, answer, body, close)
        handoff = wire.Handoff(
            transfer_id=delivery.transfer_id,
            request_id=sequence.request_id,
            prompt_ids=sequence.prompt_ids,
            position_delta=sequence.position_delta,
            sampling=sequence.sampling,
            max_tokens=sequence.max_tokens,
            output=answer.options,
            first=[wire.FirstToken(token.token_id, token.logprob, reason) for token, reason in tokens],
            generated=generated,
            logprobs={} if sequence.sampling.logprobs is None else answer.unsent_logprobs,
            num_cached_tokens=answer.num_cached_tokens,
        )
        return Reply(
            headers=(*(items.HEADERS if handoff.output.stream else ()), NEXT_DECODE),
            stream=self._first_then_handoff(body, delivery, handoff),
            on_close=close,
        )

    async def _first_then_handoff(
        self, body: bytes, delivery: KVDelivery, handoff: wire.Handoff
    ) -> AsyncGenerator[bytes, None]:
        """Yield the first token at once; end the stream normally only after D has taken over."""
        yield body
        try:
            await delivery.hand_over(handoff)
        except ServeError as error:
            delivery.give_up(error.message)
            if handoff.output.stream and error.code in (DRAINING, DECODE_DRAINING, PEER_UNREACHABLE):
                yield items.pack(items.ERROR, (), chunks.event(error.body()))
            elif error.code == PEER_UNREACHABLE:
                yield error.to_json()
            raise BrokenStream(error.message) from error

    def _end_answer(self, sequence: Sequence, answer: Answer, body: bytes, on_close: Callable[[], None]) -> Reply:
        """Return the rest of an answer that needs no more computation."""
        self._timeline.record_end(sequence.request_id)
        content = items.HEADERS if answer.options.stream else (JSON,)
        return Reply(headers=(*content, NEXT_NONE), body=body + answer.end(), on_close=on_close)

    def _end(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.engine.outbox.receivers.pop(request_id, None)
            self.engine.abort(request_id)
            self._timeline.drop(request_id)
            self.receiver.release(request_id)


class KVDelivery(OutgoingTransfer):
    """Hand-over of one prompt: call :meth:`open` before the prompt is computed, then :meth:`hand_over` or
    :meth:`give_up`.

    The decode instance (D) reserves blocks, which it keeps for ``lease_s`` without a renewal, and reads groups of
    layers while the prompt is computed.

    Attributes:
        first: end of the prompt with its first tokens; fails if the prompt fails or D gives up.
    """

    def __init__(self, prefiller: Prefiller, sequence: Sequence, decode_url: str) -> None:
        super().__init__(uuid.uuid4().hex)
        self._prefiller, self._instance = prefiller, prefiller.instance
        self._lease_s = prefiller.instance.options.peer_timeout_s
        self._sequence = sequence
        self._url = decode_url
        self._loop = asyncio.get_running_loop()
        self._is_confirmed = self._is_given_up = False
        self.first: asyncio.Future[PromptEvent] = self._loop.create_future()
        self._heard_at = time.monotonic()
        self._renewal = self._loop.create_task(self._renew())

    def feed(self, event: EngineEvent) -> None:
        """Handle the engine's event for the end of the prompt."""
        if self.first.done():
            return
        if isinstance(event, FailureEvent):
            self.first.set_exception(event.error)
        elif isinstance(event, PromptEvent):
            self.first.set_result(event)

    async def open(self) -> None:
        """Reserve blocks, waiting until D has enough. Raises ServeError."""
        sequence, memory = self._sequence, self._prefiller.weights.memory
        reserve = wire.ReserveRequest(
            transfer_id=self.transfer_id,
            request_id=sequence.request_id,
            num_prompt_tokens=sequence.num_tokens,
            max_tokens=sequence.max_tokens - len(sequence.output_ids),
            num_sequences=sequence.num_sequences,
            block_hashes=sequence.block_hashes,
            layout=memory.layout,
            lease_s=self._lease_s,
            region=memory.region,
            priority=sequence.sampling.priority,
        )
        target = wire.decode(await self._call("/kv/reserve", reserve), wire.ReserveReply)
        self.next_block, self.target = target.num_cached_blocks, target
        self._prefiller.sender.connect(self)

    def announce(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        call = self._call("/kv/announce", announcement)
        try:
            return wire.decode(asyncio.run_coroutine_threadsafe(call, self._loop).result(), wire.KVTaken)
        except ServeError as error:
            raise (PeerGone if error.code == PEER_UNREACHABLE else TransferError)(error.message) from error

    async def hand_over(self, handoff: wire.Handoff) -> None:
        """Complete the hand-over; return once D has the KV and the request.

        Raises ServeError, with code ``draining`` if this instance drains before that.
        """
        instance = self._instance
        async with instance.refusals.call(kind=InstanceFailed):
            await self._sent()
            if self.error is not None:
                code = PEER_UNREACHABLE if isinstance(self.error, PeerGone) else None
                raise InstanceFailed(f"the KV transfer to {self._url} failed: {self.error}", code=code)
            if self.cancelled:  # some of the KV remains unread
                raise InstanceFailed(f"{self._url} gave up the KV transfer")
            try:
                await instance.peers.call(self._url, "/kv/complete", handoff, self._lease_s)
            except Unavailable as error:
                raise self._blame(error) from error
        self._renewal.cancel()
        self._is_confirmed = True
        instance.telemetry.timeline.record_hand_over(handoff.request_id)
        instance.telemetry.metrics.kv_delivered(self)

    def close(self) -> None:
        """Free the prompt's blocks here, and also at D unless it took the request over."""
        if self._is_confirmed:
            self._prefiller.engine.transferred(self._sequence)
        else:
            self.give_up("")

    def give_up(self, reason: str) -> None:
        """Cancel the request here and at D; with a reason, as failed. Idempotent."""
        if not self._is_given_up:
            self._is_given_up = True
            self._renewal.cancel()
            self._stop()
            self._instance.clean_ups.start(self._cancel(reason))

    def _stop(self) -> None:
        self.cancelled = True
        self._prefiller.engine.abort(self._sequence.request_id)

    async def _cancel(self, reason: str) -> None:
        await self._sent()
        ref = wire.TransferRef(self.transfer_id, self._sequence.request_id, reason=reason)
        with suppress(ServeError):  # D is lost with its reservation, or its lease will expire
            await self._instance.peers.call(self._url, "/kv/cancel", ref, _CANCEL_TIMEOUT_S)

    async def _sent(self) -> None:
        """Wait until no announcement of this transfer is in progress."""
        sent = asyncio.Event()
        self._prefiller.sender.fence(self, partial(self._loop.call_soon_threadsafe, sent.set))
        await sent.wait()

    async def _renew(self) -> None:
        """Renew the lease until cancelled; if D has given up, stop announcing and fail the request."""
        with suppress(asyncio.CancelledError):  # its traceback would refer to this object: a reference cycle
            await self._keep_renewing()

    async def _keep_renewing(self) -> None:
        tick_s = self._lease_s / 6
        ref = wire.TransferRef(self.transfer_id, self._sequence.request_id)
        while True:
            await asyncio.sleep(tick_s)
            was_granted = self.target is not None
            try:
                await self._instance.peers.call(self._url, "/kv/renew", ref, tick_s)
            except InstanceFailed:
                continue  # if D stays away, its next call fails
            except ServeError as error:
                if was_granted:
                    self._stop()
                    if not self.first.done():
                        self.first.set_exception(InstanceFailed(f"{self._url} gave up: {error.message}"))
                    return
            self._heard_at = time.monotonic()

    async def _call(self, path: str, message: wire.Message) -> bytes:
        """Call D and return its answer, waiting as long as D answers renewals.

        Raises InstanceFailed if D has answered nothing for half a lease.
        """
        began = time.monotonic()
        call = asyncio.create_task(self._instance.peers.call(self._url, path, message))
        try:
            while not (await asyncio.wait({call}, timeout=self._lease_s / 6))[0]:
                if time.monotonic() - max(self._heard_at, began) > self._lease_s / 2:
                    raise unreachable(f"{self._url} has answered nothing for half a lease")
            return call.result()
        except Unavailable as error:
            raise self._blame(error) from error
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _blame(self, error: Unavailable) -> ServeError:
        """Attribute an error to D if D is draining, so that this instance is not blamed."""
        if error.code != DRAINING:
            return error
        return InstanceFailed(f"{self._url}: {error.message}", code=DECODE_DRAINING)
