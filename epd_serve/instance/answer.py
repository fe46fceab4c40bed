"""A request's answer as it grows: text, stop strings, log-probabilities, usage, OpenAI bytes."""

from __future__ import annotations

from collections.abc import Sequence

from epd_serve.instance.detokenizer import Decoder, Detokenizer
from epd_serve.protocol import chunks, frames
from epd_serve.protocol.tool_format import Call, CallDelta, ToolCallReader
from epd_serve.protocol.wire import OutputOptions, TokenLogprob
from epd_serve.types import SamplingParams


class Answer:
    """All ``n`` choices of one request. Streamed, :meth:`push` returns frames; else :meth:`end` returns the whole.

    An instance that goes on with a request replays the tokens that were already sent.

    Attributes:
        options: what it looks like.
    """

    def __init__(
        self, decoder: Decoder, options: OutputOptions, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        self._decoder = decoder
        self.options = options
        self._num_prompt_tokens = len(prompt_ids)
        echo = decoder.decode(list(prompt_ids), skip_special_tokens=True) if options.echo else ""
        self._choices = [_Choice(decoder, prompt_ids, sampling, echo) for _ in range(sampling.n)]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def can_move(self) -> bool:
        """Whether another instance can go on with it, or begin it anew: not where several choices are streamed,
        which go on one by one then, and each event is to tell the usage of all."""
        return len(self._choices) == 1 or not (self.options.stream and self.options.continuous_usage)

    @property
    def can_go_on(self) -> bool:
        """Whether its tokens say all of it, so that another instance with these and their KV can go on with it.
        They do not say the log-probabilities of an answer that is sent in one piece."""
        return len(self._choices) == 1 and (self.options.stream or self._choices[0].logprobs is None)

    @property
    def usage(self) -> chunks.Usage:
        return chunks.Usage(self._num_prompt_tokens, sum(choice.num_tokens for choice in self._choices))

    def is_finished(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def replay(self, index: int, token_id: int, finish_reason: str | None) -> None:
        """Add a token that the client has already."""
        self._choices[index].add(token_id, finish_reason)

    def push(self, index: int, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> bytes:
        """Add a token to a choice; returns its frame, or nothing where the answer is not streamed.

        A stop string that this token completes finishes the choice; the caller sees it by :meth:`is_finished`.
        """
        choice = self._choices[index]
        first = choice.num_tokens == 0
        offset = len(choice.text)
        text, calls = choice.add(token_id, finish_reason)
        described = None if logprob is None else self._describe(logprob)
        if described is not None and choice.logprobs is not None:
            choice.logprobs.append(described)
        if not self.options.stream:
            return b""
        event = chunks.delta_event(
            self.options,
            index,
            choice.echo + text if first else text,
            first=first,
            finish_reason=choice.finish_reason,
            logprobs=None if described is None else [described],
            text_offset=offset,
            usage=self.usage if self.options.continuous_usage else None,
            calls=calls,
        )
        return frames.pack(index, (token_id,), event)

    def end(self) -> bytes:
        """What follows the last token: the frame of usage and ``[DONE]``, or the whole answer."""
        if self.options.stream:
            usage = chunks.usage_event(self.options, self.usage) if self.options.include_usage else b""
            return frames.pack(frames.END, (), usage + chunks.DONE)
        finished = [
            chunks.ChoiceText(i, choice.text, choice.finish_reason or "stop", choice.logprobs, choice.calls)
            for i, choice in enumerate(self._choices)
        ]
        return chunks.whole_answer(self.options, finished, self.usage)

    def _describe(self, logprob: TokenLogprob) -> chunks.TokenText:
        def text(token_id: int) -> str:
            return self._decoder.decode([token_id], skip_special_tokens=False)

        top = [(text(token_id), value) for token_id, value in logprob.top]
        return chunks.TokenText(text(logprob.token_id), logprob.logprob, top)


class _Choice:
    __slots__ = ("_reader", "detokenizer", "echo", "finish_reason", "logprobs", "num_tokens")

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], sampling: SamplingParams, echo: str) -> None:
        self.detokenizer = Detokenizer(
            decoder,
            prompt_ids,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop,
        )
        has_tools = sampling.grammar is not None and sampling.grammar.tools
        self._reader = ToolCallReader() if has_tools else None
        self.echo = echo
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.logprobs: list[chunks.TokenText] | None = None if sampling.logprobs is None else []

    @property
    def text(self) -> str:
        """What is certain of the content, behind the prompt where that is repeated."""
        return self.echo + (self.detokenizer.text if self._reader is None else self._reader.content)

    @property
    def calls(self) -> list[Call]:
        return [] if self._reader is None else self._reader.calls

    def add(self, token_id: int, finish_reason: str | None) -> tuple[str, list[CallDelta]]:
        """Take a token in; returns the content and the pieces of calls that are certain now."""
        self.num_tokens += 1
        # the token that stops a generation is no text
        text = "" if finish_reason == "stop" else self.detokenizer.push(token_id)
        if finish_reason is not None and not self.detokenizer.stopped:
            text += self.detokenizer.flush()
        self.finish_reason = "stop" if self.detokenizer.stopped else finish_reason
        if self._reader is None:
            return text, []
        read = self._reader.push(text, last=self.finish_reason is not None)
        if self.finish_reason == "stop" and self._reader.calls:
            self.finish_reason = "tool_calls"
        return read
