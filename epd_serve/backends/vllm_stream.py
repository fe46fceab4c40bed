"""Streams of vLLM whose tokens are known, so that another instance can go on behind them where one stops.

vLLM tells with each event which tokens it is of (``return_token_ids``), and takes a prompt as tokens: here that of
the request and behind it what the client has of the answer. An answer that hangs on more than that is computed
again as a whole, and what the client has is compared and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from epd_serve.backends.vllm_answer import DATA, DONE, END_OF_EVENT, VllmCall
from epd_serve.backends.vllm_chat import Body
from epd_serve.errors import InstanceFailed
from epd_serve.protocol.wire import PrefillRequest
from epd_serve.rpc.items import END, ERROR, pack

_SEEDS = 1 << 31
#: Events that wait for one with the text of one token. A reader that always lags gets no other, and must not get
#: its answer in one piece; should its instance be lost just then, a character may be cut.
_MOST_HELD = 8


def can_go_on(request: PrefillRequest) -> bool:
    """Whether vLLM computes the rest of such an answer as it would have computed it within the whole.

    It does not where it looks back at more of its output than the tokens: text that it holds back (``stop``),
    penalties for repeated tokens, the state of a grammar or of a tool call. It takes no prompts with pictures as
    tokens.
    """
    sampling, prompting = request.sampling, request.prompting
    if not can_be_replayed(request) or request.items:
        return False
    if sampling.stop or sampling.bad_words or sampling.presence_penalty or sampling.frequency_penalty:
        return False
    if sampling.grammar is not None or prompting.tools:
        return False
    return request.messages is not None or sampling.logprobs is None  # whose offsets count from the answer's start


def can_be_replayed(request: PrefillRequest) -> bool:
    """Whether the events of an answer give its tokens, and only to us: streams of one choice."""
    sampling, output = request.sampling, request.output
    is_plain = not (output.echo or output.first_index or output.for_vllm)
    return output.stream and sampling.n == 1 and is_plain


def rest_of(request: PrefillRequest) -> PrefillRequest:
    """The request for the rest of the answer: its token limits are less by the tokens that were generated."""
    sampling, count = request.sampling, len(request.generated)
    if not count:
        return request
    limit = None if sampling.max_tokens is None else sampling.max_tokens - count
    rest = replace(
        sampling,
        max_tokens=limit,
        min_tokens=max(0, sampling.min_tokens - count),
        seed=(sampling.seed + count) % _SEEDS,  # the same numbers are not drawn twice
    )
    return replace(request, sampling=rest)


def give_tokens(body: Body, tokens: list[int]) -> None:
    """Have a body's prompt be these tokens, whatever its messages or its text make."""
    if "messages" in body:
        body["kv_transfer_params"] = {**body.get("kv_transfer_params", {}), "prompt_token_ids": tokens}
    else:
        body["prompt"] = tokens
        body.pop("add_special_tokens", None)


class FramedCall(VllmCall):
    """A call whose answer comes in items (:mod:`epd_serve.rpc.items`).

    Attributes:
        prompt: in tokens, where this is the rest of an answer: vLLM must report the same prompt.
        num_before: tokens of the answer that its prompt ends with.
    """

    framed = True
    prompt: list[int] | None = None
    num_before = 0
    #: Puts an event's usage right.
    rewrite_usage: Callable[[dict[str, Any]], None] | None = None
    _created = 0
    _has_ended = False
    _events = b""

    def for_request(self, request: PrefillRequest, prompt: list[int] | None) -> None:
        """``prompt``: in tokens, where it ends with those that were generated before."""
        self.prompt, self._generated, self._created = prompt, request.generated, request.output.created
        self._tokens: list[int] = []
        self.num_before = 0 if prompt is None else len(request.generated)

    def failed(self, event: bytes) -> bytes:
        return pack(ERROR, (), event + END_OF_EVENT)

    def passed(self, event: bytes) -> bytes:
        told = event.removeprefix(DATA)
        if told.strip() == DONE:
            return pack(END, self._tokens, self._events + event + END_OF_EVENT)
        try:
            answer = msgspec.json.decode(told)
            choice = (answer.get("choices") or [{}])[0]
            tokens = choice.get("token_ids") or []
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            text = (choice.get("delta") or choice).get("content", choice.get("text"))
            self._right(answer, choice)
        except (msgspec.MsgspecError, AttributeError, LookupError, TypeError) as error:
            raise InstanceFailed(f"instance {self.server.name} gave an unreadable answer ({error})") from error
        is_last = bool(choice.get("finish_reason"))
        if not self._is_new(tokens, prompt, has_choice=bool(choice), is_last=is_last):
            return b""
        self._tokens += tokens
        self._events += DATA + msgspec.json.encode(answer) + END_OF_EVENT
        self._has_ended = self._has_ended or is_last  # the last events wait for the end
        if self._has_ended or self._waits(tokens, text):
            return b""
        frame = pack(0, self._tokens, self._events)
        self._tokens, self._events = [], b""
        return frame

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        """Whether the client lacks an event. Raises InstanceFailed where the answer does not go on as it began."""
        return True

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        """Whether an event must be held back, because no instance could go on behind it."""
        return not tokens

    def _right(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        """Change an event to the form that one instance alone would have given it, without token ids."""
        answer["created"] = self._created
        for one in (answer, choice):
            for name in ("token_ids", "prompt_token_ids"):
                if name in one:
                    one[name] = None
        if usage := answer.get("usage"):
            usage["prompt_tokens"] -= self.num_before
            usage["completion_tokens"] += self.num_before
            if self.rewrite_usage is not None:
                self.rewrite_usage(usage)


class KnownTokens(FramedCall):
    """The rest of an answer, computed behind its tokens, or an answer whose rest can be computed so.

    Events wait for the next one that has the text of one token: vLLM reports no token that is a part of a
    character, and an instance that goes on must do so behind whole characters. Of several tokens in one event,
    which vLLM makes where its reader lags, the text may end before the last. The last events wait for the end: an
    answer that has ended is not gone on with.
    """

    _has_begun = False
    _num_held = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        if not self._has_begun:
            self._has_begun = True
            if self.prompt is not None and prompt != self.prompt:
                raise InstanceFailed(f"instance {self.server.name} does not take a prompt as tokens")
        is_opening = has_choice and not tokens and not is_last
        return not (self.num_before and is_opening)

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        if (text and len(tokens) == 1) or self._num_held >= _MOST_HELD:
            self._num_held = 0
            return False
        self._num_held += 1
        return True


class ReplayedTokens(FramedCall):
    """A whole answer, of which the client has the events of the tokens ``generated`` already.

    vLLM gives the same events for the same tokens, if it does not merge those of several.
    """

    _num_told = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        begin, self._num_told = self._num_told, self._num_told + len(tokens)
        missing = self._generated[begin : self._num_told]
        if tokens[: len(missing)] != missing:
            raise InstanceFailed(f"instance {self.server.name} gives another answer than the one that was begun")
        if begin < len(self._generated) < self._num_told:
            raise InstanceFailed(f"instance {self.server.name} gives the answer in other parts than the first one")
        if begin < len(self._generated) and (is_last or not has_choice):
            raise InstanceFailed(f"instance {self.server.name} ends the answer before what there is of it")
        return begin >= len(self._generated)
