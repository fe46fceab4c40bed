"""Prefill stage: tokenize, receive features, reserve blocks at D, compute, send the first token, hand off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from epd_serve.engine.engine import Engine
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InvalidRequest, ServeError, StageTimeout
from epd_serve.instance.answer import Answer, Generation, broken_structure
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.kv_delivery import KVDelivery
from epd_serve.instance.text.prompt import PromptProcessor
from epd_serve.instance.text.request_processor import S_PER_CHARACTER, RequestProcessor
from epd_serve.protocol import wire
from epd_serve.protocol.openai import chunks
from epd_serve.rpc import items
from epd_serve.rpc.server import JSON, BrokenStream, Reply
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.telemetry.span import FEATURE_WAIT, PREFILL_QUEUE, Timeline

if TYPE_CHECKING:
    from epd_serve.instance.language_engine import LanguageEngine
    from epd_serve.instance.text.grammar_compiler import GrammarCompiler

_NEXT = wire.NEXT_HEADER.encode()
_NOTE = wire.PROMPT_NOTE_HEADER.encode()
NEXT_NONE = (_NEXT, b"none")
NEXT_DECODE = (_NEXT, b"decode")


@dataclass(eq=False, slots=True)
class _Prompt:
    """A request being served.

    Attributes:
        num_tokens: estimated number of prompt tokens.
        sequence: its sequence in the engine; None before it is submitted.
        receiver: handles the engine's events; None before it is submitted.
    """

    num_tokens: int
    sequence: Sequence | None = None
    receiver: Generation | KVDelivery | None = None


@dataclass(kw_only=True, eq=False)
class Prefiller:
    """Computes prompts, and decodes their answers if the gateway names no decode instance.

    Attributes:
        compiler: compiles grammars; None if the model supports none.
        requests: running requests, by id.
    """

    engine: Engine
    prompts: PromptProcessor
    receiver: FeatureReceiver
    language: LanguageEngine
    processor: RequestProcessor
    compiler: GrammarCompiler | None
    timeline: Timeline

    def __post_init__(self) -> None:
        self.requests: dict[str, _Prompt] = {}

    def has_begun(self, request_id: str) -> bool:
        """Return whether computation of the prompt has begun."""
        request = self.requests.get(request_id)
        sequence = None if request is None else request.sequence
        return sequence is not None and sequence.state is not SequenceState.WAITING

    @property
    def num_preparing_tokens(self) -> int:
        """Estimated tokens of prompts not submitted to the engine yet."""
        return sum(one.num_tokens for one in self.requests.values() if one.sequence is None)

    @property
    def generations(self) -> list[Generation]:
        """Answers being decoded here."""
        return [one.receiver for one in self.requests.values() if isinstance(one.receiver, Generation)]

    async def prefill(self, request: wire.PrefillRequest) -> Reply:
        """Compute the prompt and return the answer as soon as the first token is there.

        Raises InvalidRequest, StageTimeout (a feature did not arrive in time), InstanceFailed (D is lost).
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
            self.timeline.record_arrival(request_id, stage, hand_off=request.decode_url is not None)
            features = asyncio.create_task(self._receive_features(request_id, items))
            try:
                sequence, answer = await self.processor.run(
                    "text", S_PER_CHARACTER * num_characters, self._prepare, request
                )
                if self.compiler is not None:
                    # an instance that continues the answer enforces the same relaxed grammar
                    sequence.sampling, sequence.constraint = await self.compiler.constrain(sequence.sampling)
                if answer.finished:  # only the end is missing
                    reply = self._end_answer(sequence, answer, b"", partial(self._end, request_id))
                else:
                    num_new = 0 if sequence.hand_off else sequence.max_tokens - len(sequence.output_ids)
                    self.engine.check_fits(sequence.num_tokens, num_new, sequence.num_forked)
                    if request.decode_url is None:
                        generation = Generation(answer, self.engine, self.timeline, request_id)
                        await self._compute(sequence, generation, features)
                        end, is_streamed = partial(self._end, request_id), answer.options.stream
                        reply = await generation.reply(stream=is_streamed, headers=(NEXT_NONE,), on_close=end)
                    else:
                        reply = await self._hand_over(request.decode_url, sequence, answer, features)
                note = wire.write_prompt_note(len(sequence.prompt_ids), had, sequence.num_cached or 0)
                return replace(reply, headers=(*reply.headers, (_NOTE, note.encode())))
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
        await self.receiver.complete(request_id, items)
        self.timeline.record_features(request_id)

    async def _compute(
        self, sequence: Sequence, receiver: Generation | KVDelivery, features: asyncio.Task[None]
    ) -> None:
        """Submit a prompt; return at its first event. Raises StageTimeout if its features arrive too late."""
        request = self.requests[sequence.request_id]
        request.receiver = receiver
        self.engine.submit(sequence, receiver if isinstance(receiver, KVDelivery) else None)
        request.sequence = sequence
        first: asyncio.Future[Any] = receiver.first
        done, _ = await asyncio.wait(
            (features, first), timeout=self.receiver.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise StageTimeout(
                f"the encoded media did not arrive within {self.receiver.timeout_s:g} s", code="feature_timeout"
            )
        await first
        self.receiver.release(sequence.request_id)

    async def _hand_over(
        self, decode_url: str, sequence: Sequence, answer: Answer, features: asyncio.Task[None]
    ) -> Reply:
        """Compute the prompt and hand the answer over to a decode instance."""
        delivery = KVDelivery(self.language, sequence, decode_url)
        generated = list(sequence.output_ids)
        is_open = False
        try:
            await delivery.open()
            is_open = True
            await self._compute(sequence, delivery, features)
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
        self.timeline.record_end(sequence.request_id)
        content = items.HEADERS if answer.options.stream else (JSON,)
        return Reply(headers=(*content, NEXT_NONE), body=body + answer.end(), on_close=on_close)

    def _end(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.engine.abort(request_id)
            self.timeline.drop(request_id)
            self.receiver.release(request_id)
