"""Streams of vLLM with known tokens, so that another instance can continue a broken stream.

vLLM returns the tokens of each event (``return_token_ids``) and takes a prompt as tokens: the request's, followed
by the answer's tokens that the client has. An answer that depends on more than its tokens is computed again as a
whole; the part that the client has is compared and dropped.
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
from epd_serve.rpc.http import HttpServer
from epd_serve.rpc.items import END, ERROR, pack

_SEEDS = 1 << 31
#: Most events held back until one has the text of a single token. For a reader that always lags, vLLM merges
#: tokens in every event; a character may be cut if the instance is lost just then.
_MOST_HELD = 8


def can_continue(request: PrefillRequest) -> bool:
    """Return whether vLLM computes the rest of such an answer apart as it would within the whole.

    It does not if the rest depends on more than the tokens: held back text (``stop``), penalties for repetition,
    the state of a grammar or tool call. Nor does it take prompts with pictures as tokens.
    """
    sampling, prompting = request.sampling, request.prompting
    if not can_be_replayed(request) or request.items:
        return False
    if sampling.stop or sampling.bad_words or sampling.presence_penalty or sampling.frequency_penalty:
        return False
    if sampling.grammar is not None or prompting.tools:
        return False
    return request.messages is not None or sampling.logprobs is None  # their offsets count from the answer's start


def can_be_replayed(request: PrefillRequest) -> bool:
    """Return whether the events of an answer can carry its tokens without showing them: streams of one choice."""
    sampling, output = request.sampling, request.output
    is_plain = not (output.echo or output.first_index or output.for_vllm)
    return output.stream and sampling.n == 1 and is_plain


def rest_of(request: PrefillRequest) -> PrefillRequest:
    """Return the request for the rest of the answer, with lower token limits."""
    sampling, count = request.sampling, len(request.generated)
    if not count:
        return request
    limit = None if sampling.max_tokens is None else sampling.max_tokens - count
    rest = replace(
        sampling,
        max_tokens=limit,
        min_tokens=max(0, sampling.min_tokens - count),
        seed=(sampling.seed + count) % _SEEDS,  # do not draw the same numbers twice
    )
    return replace(request, sampling=rest)


def set_prompt_tokens(body: Body, tokens: list[int]) -> None:
    """Replace the prompt of a body by tokens."""
    if "messages" in body:
        body["kv_transfer_params"] = {**body.get("kv_transfer_params", {}), "prompt_token_ids": tokens}
    else:
        body["prompt"] = tokens
        body.pop("add_special_tokens", None)


class FramedCall(VllmCall):
    """A call whose answer consists of items (:mod:`epd_serve.rpc.items`).

    Args:
        prompt: in tokens, for the rest of an answer: the request's prompt and the tokens generated before.
        correct_usage: corrects an event's usage.
    """

    framed = True
    _has_ended = False
    _events = b""

    def __init__(
        self,
        server: HttpServer,
        path: str,
        body: Body,
        request_id: str,
        request: PrefillRequest,
        prompt: list[int] | None,
        correct_usage: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(server, path, body | {"return_token_ids": True}, request_id)
        self._prompt, self._generated, self._created = prompt, request.generated, request.output.created
        self._tokens: list[int] = []
        self._num_before = 0 if prompt is None else len(request.generated)
        self._correct_usage = correct_usage

    def failed(self, event: bytes) -> bytes:
        return pack(ERROR, (), event + END_OF_EVENT)

    def passed(self, event: bytes) -> bytes:
        data = event.removeprefix(DATA)
        if data.strip() == DONE:
            return pack(END, self._tokens, self._events + event + END_OF_EVENT)
        try:
            answer = msgspec.json.decode(data)
            choice = (answer.get("choices") or [{}])[0]
            tokens = choice.get("token_ids") or []
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            text = (choice.get("delta") or choice).get("content", choice.get("text"))
            self._correct(answer, choice)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
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
        """Return whether the client lacks an event. Raises InstanceFailed for a different answer."""
        return True

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        """Return whether to hold an event back because no instance could continue after it."""
        return not tokens

    def _correct(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        """Make an event look like one of an unbroken answer, without token ids."""
        answer["created"] = self._created
        for one in (answer, choice):
            for name in ("token_ids", "prompt_token_ids"):
                if name in one:
                    one[name] = None
        if usage := answer.get("usage"):
            usage["prompt_tokens"] -= self._num_before
            usage["completion_tokens"] += self._num_before
            self._correct_usage(usage)


class KnownTokens(FramedCall):
    """An answer, or the rest of one, whose rest depends only on its tokens.

    Events wait for the next one with the text of a single token, as another instance must continue after a whole
    character. vLLM reports no partial characters, but for a lagging reader it merges tokens in an event, whose
    text may end before its last token. The last events wait for the end, as an ended answer is not continued.
    """

    _has_begun = False
    _num_held = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        if not self._has_begun:
            self._has_begun = True
            if self._prompt is not None and prompt != self._prompt:
                raise InstanceFailed(f"instance {self.server.name} does not take a prompt as tokens")
        is_opening = has_choice and not tokens and not is_last
        return not (self._num_before and is_opening)

    def _waits(self, tokens: list[int], text: str | None) -> bool:
        if (text and len(tokens) == 1) or self._num_held >= _MOST_HELD:
            self._num_held = 0
            return False
        self._num_held += 1
        return True


class ReplayedTokens(FramedCall):
    """A whole answer, computed again; the client has the events of the first ``generated`` tokens.

    vLLM returns the same events for the same tokens unless it merges some.
    """

    _num_read = 0

    def _is_new(self, tokens: list[int], prompt: list[int] | None, *, has_choice: bool, is_last: bool) -> bool:
        begin, self._num_read = self._num_read, self._num_read + len(tokens)
        expected = self._generated[begin : self._num_read]
        if tokens[: len(expected)] != expected:
            raise InstanceFailed(f"instance {self.server.name} computes another answer than the first instance")
        if begin < len(self._generated) < self._num_read:
            raise InstanceFailed(f"instance {self.server.name} splits the answer into other events")
        if begin < len(self._generated) and (is_last or not has_choice):
            raise InstanceFailed(f"instance {self.server.name} computes a shorter answer than the first instance")
        return begin >= len(self._generated)
