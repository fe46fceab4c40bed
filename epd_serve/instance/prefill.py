"""The prefill stage: prompt, features, reservation at D, compute, first token, hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent, PromptEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InvalidRequest, ServeError, StageTimeout
from epd_serve.instance.answer import Answer, Generation, check_constraint
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.http import JSON, Reply
from epd_serve.instance.kv_delivery import Deliveries, Delivery, handoff_of, reserve_request
from epd_serve.instance.lifecycle import Refusals, moved
from epd_serve.instance.reports import StageRates
from epd_serve.instance.text.prompt import Prompt, PromptProcessor
from epd_serve.instance.text.request_processor import S_PER_CHARACTER, RequestProcessor, wanted
from epd_serve.protocol import frames, wire
from epd_serve.protocol.openai import chunks
from epd_serve.rpc.streams import BrokenStream
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.telemetry.span import FEATURE_WAIT, PREFILL_QUEUE, Timeline
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.types import Grammar

if TYPE_CHECKING:
    from epd_serve.engine.sampling.constraints import Constraint

_NEXT = wire.NEXT_HEADER.encode()
_NOTE = wire.PROMPT_NOTE_HEADER.encode()
NEXT_NONE = (_NEXT, b"none")
NEXT_DECODE = (_NEXT, b"decode")


@dataclass(eq=False, slots=True)
class _Handover:
    """A request that another instance decodes."""

    request: wire.PrefillRequest
    sequence: Sequence
    delivery: Delivery
    started: asyncio.Future[None]
    first: asyncio.Future[PromptEvent]
    confirmed: bool = False
    given_up: bool = False

    def feed(self, event: EngineEvent) -> None:
        if isinstance(event, PromptEvent) and not self.first.done():
            self.first.set_result(event)
        elif isinstance(event, FailureEvent) and not self.first.done():
            self.first.set_exception(event.error)
        if not self.started.done():
            self.started.set_result(None)


class PrefillService:
    """Runs prompts. Decodes them too where the gateway names no decode instance.

    Args:
        deliver: how KV gets to decode instances.
        processor: runs ``prompts`` on its threads.
        delivered: told of each transfer that was confirmed, for metrics.
        timeline: told what becomes of each request, for metrics.
        listen: directs a request's engine events to a function; None ends that.
        spawn: runs a clean-up in the background, owned by the instance.
        rates: of prompts, for the load.
        refusals: what hands a request over may be refused by.
        compile: a grammar, for the sequences that follow it.

    Attributes:
        generations: of the answers that are decoded here, by request.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptProcessor,
        receiver: FeatureReceiver,
        deliver: Deliveries,
        layout: wire.KVLayout,
        *,
        processor: RequestProcessor,
        feature_timeout_s: float,
        lease_s: float,
        listen: Callable[[str, Callable[[EngineEvent], None] | None], None],
        spawn: Callable[[asyncio.Task[None]], None],
        delivered: Callable[[OutgoingTransfer], None],
        timeline: Timeline,
        rates: StageRates,
        refusals: Refusals,
        compile: Callable[[Grammar], Awaitable[Constraint]],
    ) -> None:
        self._compile = compile
        self._refusals = refusals
        self._engine = engine
        self._prompts = prompts
        self._processor = processor
        self._timeline = timeline
        self._receiver = receiver
        self._deliver = deliver
        self._rates = rates
        self._delivered = delivered
        self._layout = layout
        self._feature_timeout_s = feature_timeout_s
        self._lease_s = lease_s
        self._listen = listen
        self._spawn = spawn
        self._active: set[str] = set()
        self._preparing: dict[str, int] = {}
        self._submitted: dict[str, Sequence] = {}
        self.generations: dict[str, Generation] = {}

    @property
    def num_preparing_tokens(self) -> int:
        """The tokens of prompts that the engine does not know yet, about."""
        return sum(self._preparing.values())

    def is_serving(self, request_id: str) -> bool:
        return request_id in self._active

    def has_begun(self, request_id: str) -> bool:
        """Whether the prompt is being computed, or was."""
        sequence = self._submitted.get(request_id)
        return sequence is not None and sequence.state is not SequenceState.WAITING

    async def prefill(self, request: wire.PrefillRequest) -> Reply:
        """Compute the prompt and answer with the first token as soon as there is one.

        Raises InvalidRequest, StageTimeout (a feature did not come in time), InstanceFailed (D is gone).
        """
        request_id = request.request_id
        if request_id in self._active:
            raise InvalidRequest(f"request {request_id} is being served already", param="request_id")
        self._prompts.check_size(request)
        self._active.add(request_id)
        self._preparing[request_id] = self._prompts.estimate(request, self._rates.tokens_per_character)
        try:
            items = self._prompts.segments(request.items)
            self._receiver.expect(request_id, items)  # before all else: features may be here already
            parts = (part for item in request.items for part in item.segments)
            had = [i for i, part in enumerate(parts) if self._receiver.get(part.mm_hash) is not None]
            stage = FEATURE_WAIT if len(had) < len(items) else PREFILL_QUEUE
            self._timeline.received(request_id, stage, hand_off=request.decode_url is not None)
            features = asyncio.create_task(self._features(request_id, items))
            try:
                with wanted() as check:
                    prompt, answer = await self._processor.run(
                        "text", self._prompts.cost_s(request), self._prepare, request, check
                    )
                if prompt.sampling.grammar is not None:
                    prompt = replace(prompt, constraint=await self._compile(prompt.sampling.grammar))
                if answer.finished:  # the client lacks nothing but the end
                    reply = self._ended(request, answer)
                elif request.decode_url is None:
                    reply = await self._serve(request, prompt, answer, features)
                else:
                    reply = await self._hand_over(request, prompt, answer, request.decode_url, features)
                note = wire.write_prompt_note(len(prompt.ids), had)
                return replace(reply, headers=(*reply.headers, (_NOTE, note.encode())))
            finally:
                features.cancel()
        except BaseException:
            self._end(request_id)
            raise

    async def tokenize(self, request: wire.TokenizeRequest) -> wire.TokenizeReply:
        """The tokens of a chat or prompt. Raises InvalidRequest as :meth:`prefill` would."""
        self._prompts.check_size(request)
        cost_s = self._prompts.cost_s(request)
        with wanted() as check:
            return await self._processor.run("text", cost_s, self._prompts.tokenize, request, check)

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeReply:
        """The text of tokens. Raises InvalidRequest for those that are none."""
        cost_s = S_PER_CHARACTER * len(request.tokens)
        return wire.DetokenizeReply(
            await self._processor.run("text", cost_s, self._prompts.detokenize, request.tokens)
        )

    def _prepare(self, request: wire.PrefillRequest, check: Callable[[], None]) -> tuple[Prompt, Answer]:
        """The prompt, and the answer as far as the client has it. Runs on a thread."""
        prompt = self._prompts.process(request, check)
        if request.generated and request.sampling.n > 1:
            raise InvalidRequest("an answer of several choices cannot go on from its middle", param="generated")
        answer = Answer(self._prompts.vocabulary, request.output, prompt.sampling, prompt.ids)
        sequence = sequence_of(request, prompt, hand_off=False)
        for count, token_id in enumerate(request.generated, start=1):
            answer.replay(0, token_id, sequence.finish_reason(token_id, count, self._engine.eos_token_ids))
        return prompt, answer

    def _ended(self, request: wire.PrefillRequest, answer: Answer) -> Reply:
        self._timeline.finished(request.request_id)
        content = frames.HEADERS if request.output.stream else (JSON,)
        on_close = partial(self._end, request.request_id)
        return Reply(headers=(*content, NEXT_NONE), body=answer.end(), on_close=on_close)

    async def _features(self, request_id: str, items: list[wire.MediaRef]) -> None:
        """Return when all features of the request are here."""
        await self._receiver.complete(request_id, items)
        self._timeline.features_here(request_id)

    def _end(self, request_id: str) -> None:
        if request_id not in self._active:
            return
        self._active.discard(request_id)
        self._preparing.pop(request_id, None)
        self._submitted.pop(request_id, None)
        self.generations.pop(request_id, None)
        self._listen(request_id, None)
        self._engine.abort(request_id)
        self._timeline.drop(request_id)
        self._receiver.release(request_id)

    def _sequence(
        self, request: wire.PrefillRequest, prompt: Prompt, answer: Answer, *, hand_off: bool
    ) -> Sequence:
        sequence = sequence_of(request, prompt, hand_off=hand_off, wanted_logprobs=answer.unknown_logprobs)
        num_new = 0 if hand_off else prompt.max_tokens - len(sequence.output_ids)
        self._engine.check_fits(sequence.num_tokens, num_new, sequence.num_forked)
        return sequence

    # ------------------------------------------------------------------ decoded here

    async def _serve(
        self, request: wire.PrefillRequest, prompt: Prompt, answer: Answer, features: asyncio.Task[None]
    ) -> Reply:
        sequence = self._sequence(request, prompt, answer, hand_off=False)
        generation = Generation(answer, self._engine, lambda: self._timeline.finished(request.request_id))
        started = asyncio.get_running_loop().create_future()

        def feed(event: EngineEvent) -> None:
            if not started.done():
                started.set_result(None)
            self._listen(request.request_id, generation.feed)
            generation.feed(event)

        self.generations[request.request_id] = generation
        self._listen(request.request_id, feed)
        self._submit(request, sequence)
        await self._started(request, started, features)
        return await generation.reply(
            stream=request.output.stream, headers=(NEXT_NONE,), on_close=lambda: self._end(request.request_id)
        )

    def _submit(
        self, request: wire.PrefillRequest, sequence: Sequence, transfer: OutgoingTransfer | None = None
    ) -> None:
        self._engine.submit(sequence, transfer)
        self._submitted[request.request_id] = sequence
        self._preparing.pop(request.request_id, None)

    async def _started(
        self, request: wire.PrefillRequest, started: asyncio.Future[None], features: asyncio.Task[None]
    ) -> None:
        """Wait for the prompt's first event; its features must be here before their deadline."""
        done, _ = await asyncio.wait(
            (features, started), timeout=self._feature_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise StageTimeout(
                f"the encoded media did not arrive within {self._feature_timeout_s:g} s",
                code="feature_timeout",
            )
        await asyncio.shield(started)
        self._receiver.release(request.request_id)

    # ------------------------------------------------------------------ decoded elsewhere

    async def _hand_over(
        self,
        request: wire.PrefillRequest,
        prompt: Prompt,
        answer: Answer,
        decode_url: str,
        features: asyncio.Task[None],
    ) -> Reply:
        sequence = self._sequence(request, prompt, answer, hand_off=True)
        reserve = reserve_request(sequence, len(request.generated), self._layout, self._lease_s)
        loop = asyncio.get_running_loop()
        work = _Handover(
            request=request,
            sequence=sequence,
            delivery=self._deliver(reserve, sequence, decode_url),
            started=loop.create_future(),
            first=loop.create_future(),
        )
        await work.delivery.open(work.feed)
        try:
            self._listen(request.request_id, work.feed)
            self._submit(request, sequence, work.delivery.transfer)
            await self._started(request, work.started, features)
            event = await work.first
            check_constraint(event.sequence)
            answer.learn(event.sequence.logprobs)
            body = b"".join(
                answer.push(index, token.token_id, token.logprob, reason)
                for index, (token, reason) in enumerate(event.tokens)
            )
        except BaseException as error:
            self._give_up(work, error.message if isinstance(error, ServeError) else "")
            raise
        if answer.finished:
            self._timeline.finished(request.request_id)
            content = frames.HEADERS if request.output.stream else (JSON,)
            return Reply(
                headers=(*content, NEXT_NONE),
                body=body + answer.end(),
                on_close=lambda: self._close_handover(work),
            )
        first = [wire.FirstToken(token.token_id, token.logprob, reason) for token, reason in event.tokens]
        handoff = handoff_of(reserve, sequence, request.generated, first, request.output, answer.unsent_logprobs)
        return Reply(
            headers=(*(frames.HEADERS if request.output.stream else ()), NEXT_DECODE),
            stream=self._first_then_handoff(body, work, handoff),
            on_close=lambda: self._close_handover(work),
        )

    async def _first_then_handoff(
        self, body: bytes, work: _Handover, handoff: wire.Handoff
    ) -> AsyncGenerator[bytes, None]:
        """The first token at once; the stream ends in order only when D has taken over."""
        yield body
        try:
            async with self._refusals.call(lambda: True, moved):
                await work.delivery.hand_over(handoff)
            self._timeline.handed_over(work.request.request_id)
            work.confirmed = True
            self._delivered(work.delivery.transfer)
        except ServeError as error:
            self._give_up(work, error.message)
            if work.request.output.stream and error.code in (DRAINING, DECODE_DRAINING, PEER_UNREACHABLE):
                yield frames.pack(frames.ERROR, (), chunks.event(error.body()))
            elif error.code == PEER_UNREACHABLE:
                yield error.to_json()
            raise BrokenStream(error.message) from error

    def _close_handover(self, work: _Handover) -> None:
        if work.confirmed:
            self._engine.transferred(work.sequence)
        else:
            self._give_up(work, "")
        self._end(work.request.request_id)

    def _give_up(self, work: _Handover, reason: str) -> None:
        """Stop writing, then tell D so. Idempotent."""
        if work.given_up:
            return
        work.given_up = True
        work.delivery.stop()
        self._engine.abort(work.request.request_id)
        self._spawn(asyncio.create_task(work.delivery.withdraw(reason)))


def sequence_of(
    request: wire.PrefillRequest, prompt: Prompt, *, hand_off: bool, wanted_logprobs: range = range(0)
) -> Sequence:
    """``hand_off``: another instance decodes it."""
    return Sequence(
        request_id=request.request_id,
        prompt_ids=prompt.ids,
        sampling=prompt.sampling,
        max_tokens=prompt.max_tokens,
        positions=prompt.positions,
        position_delta=prompt.position_delta,
        spans=prompt.spans,
        both_ways=prompt.both_ways,
        block_hashes=prompt.block_hashes,
        num_sequences=request.sampling.n,
        hand_off=hand_off,
        constraint=prompt.constraint,
        output_ids=list(request.generated),
        wanted_logprobs=wanted_logprobs,
    )
