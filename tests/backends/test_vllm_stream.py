"""Streams whose tokens are known: what another instance goes on behind, and what the client sees of that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from item_bodies import whole_items
from msgspec.structs import replace
from vllm_backend import request

from epd_serve.backends import vllm_answer
from epd_serve.backends.vllm_answer import Correction, KnownTokens, ReplayedTokens
from epd_serve.backends.vllm_request import can_be_replayed, can_continue, rest_of, set_prompt_tokens
from epd_serve.errors import InstanceFailed
from epd_serve.protocol.wire import MediaRef, PrefillRequest
from epd_serve.rpc.items import END, ERROR, ItemReader

PROMPT = [7, 8, 9]


def asked(generated: list[int] | None = None, **fields: Any) -> PrefillRequest:
    prompt = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hi"}]}
    return request({"stream": True, "max_tokens": 9, **prompt, **fields}, generated=generated)


def chunk(text: str | None, tokens: list[int] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": tokens}
    return b"data: " + msgspec.json.encode({"created": 77, "choices": [choice], **fields})


def known(request: PrefillRequest, prompt: list[int] | None = None) -> KnownTokens:
    return KnownTokens("d0", Correction(), request, prompt)


def usage(completion_tokens: int, prompt_tokens: int = 3) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    counts["total_tokens"] = prompt_tokens + completion_tokens
    return b"data: " + msgspec.json.encode({"created": 77, "choices": [], "usage": counts})


def tokens_of(items: list[tuple[int, list[int], bytes]]) -> list[tuple[int, list[int]]]:
    return [(choice, tokens) for choice, tokens, _ in items]


def texts(events: bytes) -> list[str]:
    told = [one.removeprefix(b"data: ") for one in events.split(b"\n\n") if one and b"[DONE]" not in one]
    answers = [msgspec.json.decode(one) for one in told]
    assert all(one["created"] == 5 for one in answers)
    assert all(one.get("prompt_token_ids") is None for one in answers)
    assert all(choice["token_ids"] is None for one in answers for choice in one["choices"])
    return [choice["delta"]["content"] for one in answers for choice in one["choices"]]


def test_tokens_are_out_with_their_text() -> None:
    call = known(asked())
    said = [
        chunk(None, prompt_token_ids=PROMPT),
        chunk("a", [1]),
        chunk("", [2]),  # the first part of a character
        chunk("é", [3]),
        chunk("z", [4], "length"),
        usage(4),
        b"data: [DONE]",
    ]
    frames = [call.passed(event) for event in said]
    assert [bool(frame) for frame in frames] == [False, True, False, True, False, False, True]
    whole = whole_items(b"".join(frames))
    assert tokens_of(whole) == [(0, [1]), (0, [2, 3]), (END, [4])]
    assert [texts(events) for _, _, events in whole] == [["", "a"], ["", "é"], ["z"]]
    assert whole[-1][2].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("text", "tokens", "piece"), [("ab", 2, 18), ("", 1, 9)])
def test_an_answer_whose_tokens_never_come_alone_comes_in_pieces(text: str, tokens: int, piece: int) -> None:
    call = known(asked())
    out = b"".join(call.passed(chunk(text, [number] * tokens)) for number in range(40))
    assert [len(ids) for _, ids, _ in whole_items(out)] == [piece] * 4


@given(text=st.text("aé語🙂", min_size=1, max_size=4), data=st.data())
def test_what_is_out_is_what_counts(text: str, data: st.DataObject) -> None:
    """Tokens are bytes; however vLLM merges them, those of all frames make the text of all frames.

    But for those of a reader that lags for ever, which are let go in the middle of a character.
    """
    call = known(asked())
    tokens, out, before, shown = list(text.encode()), b"", 0, 0

    def check() -> str:
        frames = whole_items(out)
        said = "".join(one for _, _, events in frames for one in texts(events))
        assert bytes(token for _, ids, _ in frames for token in ids) == said.encode()
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_answer, "_MOST_HELD", 4 * len(text))
        while before < len(tokens):
            counted = before + data.draw(st.integers(1, min(3, len(tokens) - before)))
            so_far = bytes(tokens[:counted]).decode(errors="ignore")
            out += call.passed(chunk(so_far[shown:], tokens[before:counted]))
            before, shown = counted, len(so_far)
            check()
        out += call.passed(chunk("", [], "length")) + call.passed(b"data: [DONE]")
    assert check() == text


def test_the_rest_of_an_answer_is_without_its_opening() -> None:
    call = known(asked([1, 2]), [*PROMPT, 1, 2])
    said = [
        chunk(None, prompt_token_ids=[*PROMPT, 1, 2]),
        chunk("b", [3]),
        chunk("", [4], "stop"),
        usage(2, prompt_tokens=5),
        b"data: [DONE]",
    ]
    whole = whole_items(b"".join(map(call.passed, said)))
    assert tokens_of(whole) == [(0, [3]), (END, [4])] and texts(whole[0][2]) == ["b"]
    assert b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}' in whole[1][2]


@pytest.mark.parametrize("told", [{}, {"prompt_token_ids": PROMPT}])
def test_a_server_that_begins_the_answer_anew_is_not_forwarded(told: dict[str, Any]) -> None:
    call = known(asked([1]), [*PROMPT, 1])
    with pytest.raises(InstanceFailed, match="does not take a prompt as tokens"):
        call.passed(chunk(None, **told))


def replayed(request: PrefillRequest) -> ReplayedTokens:
    return ReplayedTokens("d0", Correction(), request)


def test_an_answer_that_is_computed_again_is_shown_from_where_it_broke_off() -> None:
    """Whatever its text hangs on: here a stop string holds the text of one token back."""
    said = [
        chunk(None, prompt_token_ids=PROMPT),
        chunk("", [1]),
        chunk("a", [2]),
        chunk("b", [3]),
        chunk("cd", [4], "stop"),
        usage(4),
        b"data: [DONE]",
    ]
    call = replayed(asked())
    whole = whole_items(b"".join(map(call.passed, said)))
    assert tokens_of(whole) == [(0, [1]), (0, [2]), (0, [3]), (END, [4])]
    assert b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}' in whole[-1][2]
    for seam in range(1, 4):
        call = replayed(asked([1, 2, 3][:seam]))
        assert whole_items(b"".join(map(call.passed, said))) == whole[seam:]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([chunk("a", [1]), chunk("x", [9])], "another answer"),
        ([chunk("a", [1]), chunk("bc", [2, 3])], "into other events"),
        ([chunk("a", [1], "stop")], "a shorter answer"),
        ([chunk("a", [1]), b'data: {"choices":[]}'], "a shorter answer"),
    ],
)
def test_another_answer_is_not_forwarded(events: list[bytes], why: str) -> None:
    call = replayed(asked([1, 2]))
    *seen, last = events
    assert not any(map(call.passed, seen))
    with pytest.raises(InstanceFailed, match=why):
        call.passed(last)


def test_what_is_no_event_is_the_instances_failure() -> None:
    for event in (b"data: {", b"data: []", b'data: {"choices":[3]}', b'data: {"choices":{"0":1}}'):
        call = known(asked())
        with pytest.raises(InstanceFailed, match="unreadable"):
            call.passed(event)


def test_an_error_comes_behind_what_is_out() -> None:
    call = known(asked())
    frames = call.passed(chunk("a", [1])) + call.passed(chunk("", [2]))
    frames += call.failed(b'data: {"error":{"message":"the engine is dead","code":500}}')
    assert tokens_of(whole_items(frames)) == [(0, [1]), (ERROR, [])]
    reader = ItemReader()
    reader.read(frames)
    assert reader.error is not None and b"the engine is dead" in reader.error


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"temperature": 0.7, "logprobs": True, "stop_token_ids": [3], "repetition_penalty": 1.2}, True),
        ({"prompt": "hi"}, True),
        ({"prompt": [1, 2]}, True),
        ({"stream": False}, False),
        ({"n": 2}, False),
        ({"stop": "x"}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"bad_words": ["x"]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"prompt": "hi", "logprobs": 1}, False),
        ({"prompt": "hi", "echo": True}, False),
    ],
)
def test_only_what_hangs_on_the_tokens_alone_can_continue(fields: dict[str, Any], may: bool) -> None:
    assert can_continue(asked(**fields)) is may


def test_with_pictures_and_tools_the_whole_answer_is_computed_again() -> None:
    plain = asked()
    tools = replace(plain, prompting=replace(plain.prompting, tools="[]"))
    for one in (replace(plain, items=[MediaRef(mm_hash="a", width=2, height=2)]), tools, asked(stop="x")):
        assert can_be_replayed(one) and not can_continue(one)
    assert not any(can_be_replayed(asked(**fields)) for fields in ({"n": 2}, {"stream": False}))
    assert not can_be_replayed(asked(prompt="hi", echo=True))


@given(st.lists(st.integers(0, 99), max_size=8), st.integers(0, 8), st.integers(0, 2**31 - 1))
def test_limits_shrink_by_what_was_generated(generated: list[int], min_tokens: int, seed: int) -> None:
    request = asked(generated)
    sampling = replace(request.sampling, min_tokens=min_tokens, seed=seed)
    rest = rest_of(replace(request, sampling=sampling)).sampling
    assert rest.max_tokens == 9 - len(generated) > 0
    assert rest.min_tokens == max(0, min_tokens - len(generated))
    assert (rest.seed == seed) is (not generated)
    assert 0 <= rest.seed < 2**31


def test_prompts_are_given_as_tokens() -> None:
    for transfer in ({}, {"do_remote_decode": True}):
        body: dict[str, Any] = {"messages": [], **({"kv_transfer_params": {**transfer}} if transfer else {})}
        set_prompt_tokens(body, [1, 2])
        assert body == {"messages": [], "kv_transfer_params": {**transfer, "prompt_token_ids": [1, 2]}}
    body = {"prompt": "hi", "add_special_tokens": False}
    set_prompt_tokens(body, [1, 2])
    assert body == {"prompt": [1, 2]}
