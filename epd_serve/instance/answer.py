"""Build a request's answer from tokens: text, stop strings, log-probabilities, usage, OpenAI bytes."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import msgspec

from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent, TokenEvent
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.instance.text.tokenizer import Detokenizer, Tokenizer
from epd_serve.protocol.openai import chunks
from epd_serve.protocol.openai.tool_format import FORMATS, Call, CallDelta, ToolCallReader
from epd_serve.protocol.wire import OutputOptions, TokenLogprob
from epd_serve.rpc import items
from epd_serve.rpc.server import JSON, BrokenStream, Header, Pieces, Reply
from epd_serve.telemetry.span import Timeline
from epd_serve.types import SamplingParams, Thinking


class Answer:
    """All ``n`` choices of a request. :meth:`push` returns items of a stream, :meth:`end` a whole answer.

    An instance that takes over a request replays the tokens already sent. Log-probabilities are sent together with
    the text of their tokens. Tokens without text (the end, a stop string) have none, unless the answer echoes the
    prompt, because clients that request an echo count tokens.

    Attributes:
        options: format of the answer.
        choices: the choices so far.
        num_cached_tokens: prompt tokens found in P's prefix cache.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: OutputOptions, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.options = options
        self.num_cached_tokens = 0
        self._prompt_ids = prompt_ids
        self._is_empty = sampling.max_tokens == 0
        self._is_streamed, self._tells_usage = options.stream, options.continuous_usage
        self._logprobs: dict[int, TokenLogprob] = {}  # of tokens before the pushed ones, by index
        echo = tokenizer.decode(list(prompt_ids), skip_special_tokens=True) if options.echo else ""
        self._echoed: list[_Token] = []
        if options.echo and sampling.logprobs is not None:
            prompt = Choice(tokenizer, (), SamplingParams(seed=0, logprobs=0), "", lists_all=True)
            for token_id in prompt_ids:
                prompt.add(token_id, None, None)
            self._echoed = [replace(token, start=min(token.start, len(echo))) for token in prompt.untold(False)]
        self.choices = [
            Choice(tokenizer, prompt_ids, sampling, echo, lists_all=options.echo) for _ in range(sampling.n)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def usage(self) -> chunks.Usage:
        num_prompt, num_output = len(self._prompt_ids), sum(choice.num_tokens for choice in self.choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        return chunks.Usage(num_prompt, num_output, min(self.num_cached_tokens, num_prompt), num_reasoning)

    def replay(self, token_ids: Sequence[int], last_finish_reason: str | None = None) -> None:
        """Add tokens of a single-choice answer that the client already has."""
        for number, token_id in enumerate(token_ids, start=1):
            self.choices[0].add(token_id, last_finish_reason if number == len(token_ids) else None, None)

    # ------------------------------------------------------------------ log-probabilities of earlier tokens

    @property
    def unknown_logprobs(self) -> range:
        """Range of tokens, by index from the first prompt token, whose log-probabilities may still be missing.

        They belong to an echoed prompt, or to replayed tokens whose text is held back.
        """
        choice, num_prompt = self.choices[0], len(self._prompt_ids)
        known = range(num_prompt + choice.num_tokens)
        if choice.held is None:
            return known[:0]
        if self.options.echo and not choice.num_tokens:
            return known[1:]  # the first token lacks a log-probability
        waiting = [token.index for token in choice.untold(self.options.stream) if token.logprob is None]
        return known[waiting[0] :] if waiting else known[:0]

    def learn(self, logprobs: Mapping[int, TokenLogprob]) -> None:
        """Add log-probabilities of tokens that were not pushed, by index. Call it before the next push."""
        self._logprobs.update(logprobs)
        for token in self.choices[0].untold(self.options.stream):
            token.logprob = token.logprob or logprobs.get(token.index)

    @property
    def unsent_logprobs(self) -> dict[int, TokenLogprob]:
        """Log-probabilities that an instance must :meth:`learn` to take over the answer."""
        tokens = self.choices[0].untold(self.options.stream)
        unsent = {token.index: token.logprob for token in tokens if token.logprob is not None}
        return unsent if self.options.stream else {**self._logprobs, **unsent}

    # ------------------------------------------------------------------ tokens in, bytes out

    def push(self, index: int, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> bytes:
        """Add a token to a choice and return its stream item, or b"" if the answer is not streamed.

        If the token completes a stop string, the choice finishes and its ``finish_reason`` is set. With
        ``max_tokens: 0``, the first token is dropped and finishes the choice.
        """
        choice = self.choices[index]
        first = not choice.num_tokens and choice.finish_reason is None
        if self._is_empty:
            choice.finish_reason, news = "length", _News("")
        else:
            if logprob is None and self._logprobs:
                logprob = self._logprobs.get(len(self._prompt_ids) + choice.num_tokens)
            news = choice.add(token_id, finish_reason, logprob)
            if self.options.token_ids:
                choice.token_ids.append(token_id)
        if not self._is_streamed:
            return b""
        told = None if choice.held is None else self._describe(choice, news.told, first=first)
        text, is_reasoning = news.reasoning or news.text, bool(news.reasoning)
        tells_all = self._tells_usage or self.options.token_ids
        says_nothing = not (first or text or news.calls or news.told or choice.finish_reason)
        if says_nothing and choice.may_hold and not tells_all:
            event = b""  # an incomplete call name or reasoning tag
        elif first or choice.finish_reason is not None or told is not None or news.calls or tells_all:
            event = chunks.delta_event(
                self.options,
                index,
                choice.echo + news.text if first else news.text,
                first=first,
                finish_reason=choice.finish_reason,
                logprobs=told,
                usage=self.usage if self._tells_usage else None,
                calls=news.calls,
                reasoning=news.reasoning,
                stop_reason=choice.detokenizer.stop_string,
                prompt_ids=self._prompt_ids,
                token_ids=() if self._is_empty else (token_id,),
            )
        else:
            template = choice.templates.get(is_reasoning)
            if template is None:
                template = chunks.DeltaTemplate(self.options, index, is_reasoning=is_reasoning)
                choice.templates[is_reasoning] = template
            event = template.event(text)
        return items.pack(index, () if self._is_empty else (token_id,), event)

    def end(self) -> bytes:
        """Return the item with usage and ``[DONE]`` that ends a stream, or the whole answer."""
        if self.options.stream:
            usage = chunks.usage_event(self.options, self.usage) if self.options.include_usage else b""
            return items.pack(items.END, (), usage + chunks.DONE)
        finished = [
            chunks.ChoiceText(
                index,
                choice.text,
                choice.finish_reason or "stop",
                None if choice.held is None else self._describe(choice, choice.told, first=True),
                choice.calls,
                choice.reasoning,
                choice.token_ids,
                choice.detokenizer.stop_string,
            )
            for index, choice in enumerate(self.choices)
        ]
        return chunks.whole_answer(self.options, finished, self.usage, self._prompt_ids)

    def _describe(self, choice: Choice, tokens: Sequence[_Token], *, first: bool) -> list[chunks.ScoredToken]:
        """Return tokens with their log-probabilities, preceded by those of an echoed prompt if ``first``."""
        bytes_of, length = self._tokenizer.bytes_of, len(choice.text)
        echoed = [(one.token_id, self._logprobs.get(one.index), one.start) for one in self._echoed if first]
        told = [(one.token_id, one.logprob, min(len(choice.echo) + one.start, length)) for one in tokens]
        described = []
        for token_id, logprob, offset in [*echoed, *told]:
            top = [] if logprob is None else [(bytes_of(other), value) for other, value in logprob.top]
            value = None if logprob is None else logprob.logprob
            described.append(chunks.ScoredToken(bytes_of(token_id), value, top, offset))
        return described


@dataclass(slots=True)
class _Token:
    """A token whose log-probability the client wants.

    ``index`` counts from the first prompt token; ``start`` is its position in the answer in characters.
    """

    token_id: int
    index: int
    start: int
    logprob: TokenLogprob | None


class _News(msgspec.Struct, frozen=True, gc=False):
    """Newly certain content, call deltas, tokens and reasoning."""

    text: str
    calls: Sequence[CallDelta] = ()
    told: Sequence[_Token] = ()
    reasoning: str = ""


class Choice:
    """One choice of an answer.

    Attributes:
        held: tokens whose text is held back; None without log-probabilities.
        told: tokens whose text is out.
        reader: parses tool calls; None without tools.
        may_hold: whether the text of some tokens may be held back.
        reasoning, num_reasoning_tokens: the text between <think> and </think>, and its number of tokens.
        token_ids: all token ids, if the client wants them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        echo: str,
        *,
        lists_all: bool,
    ) -> None:
        """Start a choice with the text ``echo``. ``lists_all``: also report log-probabilities of hidden tokens."""
        self.reader: ToolCallReader | None = None
        skip_special_tokens = sampling.skip_special_tokens
        if sampling.grammar is not None and sampling.grammar.tools:
            format = FORMATS[sampling.grammar.format]
            self.reader = format.reader(sampling.grammar.tools)
            # the reader needs the special tokens that delimit calls
            is_special = tokenizer.inner.convert_tokens_to_ids(format.opener) in tokenizer.special_ids
            skip_special_tokens = skip_special_tokens and not is_special
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            sampling.stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop,
        )
        self._thinking = sampling.thinking
        self.may_hold = self.reader is not None or self._thinking is not None
        self._is_thinking = self._thinking is not None and self._thinking.is_open
        self._thoughts = Detokenizer(tokenizer, ()) if self._thinking is not None else None
        self._blanks = ""  # trailing whitespace of the reasoning so far
        self._skips_blanks = False
        self.reasoning = ""
        self.num_reasoning_tokens = 0
        self.token_ids: list[int] = []
        self._hidden_ids = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._bytes_of = tokenizer.bytes_of
        self._lists_all = lists_all
        self._num_prompt_tokens = len(prompt_ids)
        self._num_read = 0
        self._unread = b""  # bytes of later tokens that do not complete a character
        self.templates: dict[bool, chunks.DeltaTemplate] = {}
        self.echo = echo
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.held: list[_Token] | None = None if sampling.logprobs is None else []
        self.told: list[_Token] = []

    @property
    def text(self) -> str:
        """Echoed prompt and certain content."""
        return self.echo + (self.detokenizer.text if self.reader is None else self.reader.content)

    @property
    def calls(self) -> list[Call]:
        return [] if self.reader is None else self.reader.calls

    def untold(self, stream: bool) -> list[_Token]:
        """Return the tokens whose log-probabilities have not been sent."""
        return [*(() if stream else self.told), *(self.held or ())]

    def add(self, token_id: int, finish_reason: str | None, logprob: TokenLogprob | None) -> _News:
        """Add a token and return what became certain."""
        if (thinking := self._thinking) is not None:
            if self._is_thinking or (not self.num_tokens and token_id == thinking.start_id):
                return self._think(token_id, finish_reason, thinking)
            if self._skips_blanks and finish_reason is None and self._bytes_of(token_id).isspace():
                self.num_tokens += 1
                return _News("")
            self._skips_blanks = False
        if self.held is not None:
            is_shown = finish_reason != "stop" and token_id not in self._hidden_ids
            if is_shown or self._lists_all:
                start = self._start_of(token_id if is_shown else None)
                self.held.append(_Token(token_id, self._num_prompt_tokens + self.num_tokens, start, logprob))
        # the token that stops generation is without text
        text = "" if finish_reason == "stop" else self.detokenizer.push(token_id)
        if finish_reason is not None and not self.detokenizer.stopped:
            text += self.detokenizer.flush()
        self.finish_reason = "stop" if self.detokenizer.stopped else finish_reason
        self.num_tokens += 1
        if self.reader is None and self.held is None:
            return _News(text)
        calls: list[CallDelta] = []
        if self.reader is not None:
            text, calls = self.reader.push(text, self.finish_reason)
            if self.finish_reason == "stop" and self.reader.calls:
                self.finish_reason = "tool_calls"
        return _News(text, calls, self._tell())

    def _think(self, token_id: int, finish_reason: str | None, thinking: Thinking) -> _News:
        """Add a reasoning token or tag; strip whitespace around the reasoning."""
        assert self._thoughts is not None
        text = ""
        if self._is_thinking and token_id == thinking.end_id:
            self._is_thinking, self._skips_blanks = False, True
            text = self._thoughts.flush()
        elif self._is_thinking and finish_reason != "stop":
            self.num_reasoning_tokens += 1
            text = self._thoughts.push(token_id)
        else:
            self._is_thinking = True
        if finish_reason is not None:
            text += self._thoughts.flush()
        self.finish_reason = finish_reason
        self.num_tokens += 1
        text = self._blanks + text if self.reasoning else text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self.reasoning += shown
        return _News("", reasoning=shown)

    def _start_of(self, token_id: int | None) -> int:
        """Return the character position where a token starts; ``token_id`` is None for a token without text."""
        if self._num_read != self.detokenizer.num_read:
            self._num_read, self._unread = self.detokenizer.num_read, b""
        token = b"" if token_id is None else self._bytes_of(token_id)
        goes_on = token[:1] and token[0] & 0xC0 == 0x80
        characters, _ = codecs.utf_8_decode(self._unread, "replace", not goes_on)
        self._unread += token
        return self._num_read + len(characters)

    def _tell(self) -> list[_Token]:
        """Release and return the held tokens whose text is at least partly out."""
        if not self.held:
            return []
        length = len(self.text) - len(self.echo)
        is_cut = self.detokenizer.stopped or bool(self.calls)  # the rest is not content
        is_cut = is_cut or length < len(self.detokenizer.text)
        if self.finish_reason is not None and (self._lists_all or not is_cut):
            length = self.detokenizer.num_read + 1
        is_out = (one.start < length or not self._bytes_of(one.token_id) for one in self.held)
        told = self.held[: sum(takewhile(bool, is_out))]
        self.held = [] if self.finish_reason is not None else self.held[len(told) :]
        self.told += told
        return told


class Generation:
    """Turns engine events into an OpenAI answer, streamed or whole.

    Attributes:
        answer: the answer so far.
        first: done at the first event.
        can_move: whether another instance can continue or restart it; false for a stream of several choices.
    """

    def __init__(self, answer: Answer, engine: Engine, timeline: Timeline, request_id: str) -> None:
        options = answer.options
        self.can_move = len(answer.choices) == 1 or not options.stream
        self.answer = answer
        self.first: asyncio.Future[None] = asyncio.Future()
        self._engine = engine
        self._timeline, self._request_id = timeline, request_id
        self._pieces = Pieces()
        self._finished: set[int] = set()  # finished choices

    def feed(self, event: EngineEvent) -> None:
        """Handle an engine event of the request."""
        if not self.first.done():
            self.first.set_result(None)
        if not isinstance(event, TokenEvent):
            if isinstance(event, FailureEvent):
                self._break_off(event.error)
            return
        answer, sequence, token = self.answer, event.sequence, event.token
        answer.num_cached_tokens = sequence.num_cached or 0
        index = sequence.index
        if index in self._finished:
            return  # computed before the engine knew of the stop string
        if sequence.constraint is not None and sequence.constraint.error:
            self._break_off(broken_structure(sequence.constraint.error))
            return
        if event.logprobs:
            answer.learn(event.logprobs)
        if frame := answer.push(index, token.token_id, token.logprob, event.finish_reason):
            self._pieces.put(frame)
        if answer.choices[index].finish_reason is None:
            return
        self._finished.add(index)
        if event.finish_reason is None:
            self._engine.stop_sequence(sequence)
        if answer.finished:
            self._timeline.record_end(self._request_id)
            self._pieces.put(answer.end())
            self._pieces.end()

    def fail(self, error: ServeError) -> None:
        self.can_move = False  # the gateway already handles this error
        self._break_off(error)

    def _break_off(self, error: ServeError) -> None:
        """Fail the answer; after its first byte, send an error item and break the stream off."""
        if not self._pieces.has_begun:
            self._pieces.end(error)
            return
        self._pieces.put(items.pack(items.ERROR, (), chunks.event(error.body())))
        broken = BrokenStream(error.message)
        broken.__cause__ = error
        self._pieces.end(broken)

    async def reply(
        self, *, stream: bool, on_close: Callable[[], None], headers: tuple[Header, ...] = ()
    ) -> Reply:
        """Return the reply. Raises an error that occurs before the first byte."""
        if not stream:
            return Reply(headers=(JSON, *headers), body=await self._pieces.read(), on_close=on_close)
        await self._pieces.wait()
        return Reply(headers=(*items.HEADERS, *headers), stream=self._pieces, on_close=on_close)


def broken_structure(reason: str) -> InvalidRequest:
    """Return the error for an answer whose grammar became too complex to enforce."""
    return InvalidRequest(f"the answer's structure cannot be enforced: {reason}", code="structure_too_complex")
