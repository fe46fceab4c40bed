"""Answers as they grow: what each token adds to an event, and to its log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fleet import Books
from in_process import serving
from prompts import completion
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.errors import ServeError
from epd_serve.instance.answer import Answer
from epd_serve.instance.text.tokenizer import Tokenizer
from epd_serve.protocol.wire import OutputOptions, TokenLogprob, encode
from epd_serve.rpc.items import ItemReader
from epd_serve.rpc.link import Link
from epd_serve.types import Grammar, SamplingParams, Thinking, ToolSchema

TOKENIZER = Tokenizer(AutoTokenizer.from_pretrained(weights_dir()))
BEYOND = len(TOKENIZER.inner)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def answers(ids: list[int], finish_reason: str, **sampling: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices of the events of a stream, and that of the answer in one piece. A token's logprob is its place's."""
    made = []
    for stream in (True, False):
        options = OutputOptions("chat", "chatcmpl-1", 0, "m", stream=stream)
        answer = Answer(TOKENIZER, options, SamplingParams(seed=0, **sampling), [1, 2])
        reader, events = ItemReader(), b""
        for place, token in enumerate(ids):
            logprob = TokenLogprob(-1.0 - place, [(token, -1.0 - place)])
            reason = finish_reason if place == len(ids) - 1 else None
            events += reader.read(answer.push(0, token, logprob, reason))
        assert not stream or reader.tokens == ids
        made.append(events if stream else answer.end())
    chunks = [json.loads(event[6:])["choices"][0] for event in made[0].split(b"\n\n") if event]
    return chunks, json.loads(made[1])["choices"][0]


@pytest.mark.parametrize(
    "ids",
    [
        [605, 103],
        [BEYOND, 103],
        [BEYOND, BEYOND + 1],
        [*ids_of("so"), BEYOND + 7, *ids_of("\N{SNOWMAN}"), BEYOND, *ids_of("it"), BEYOND],
    ],
)
def test_each_token_has_an_entry_of_its_own(ids: list[int]) -> None:
    chunks, whole = answers(ids, "length", logprobs=1)
    streamed = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    for listed in (streamed, whole["logprobs"]["content"]):
        assert [entry["logprob"] for entry in listed] == [-1.0 - place for place in range(len(ids))]
        assert [bytes(entry["bytes"]) for entry in listed] == [TOKENIZER.bytes_of(token) for token in ids]
        assert [entry["top_logprobs"][0]["bytes"] for entry in listed] == [entry["bytes"] for entry in listed]


TOOLS = Grammar(tools=[ToolSchema(name="f", parameters="{}")])


@pytest.mark.parametrize("text", [CALL, f"So. {CALL}", f"{CALL}\n{CALL}"])
def test_a_streamed_call_begins_without_empty_deltas(text: str) -> None:
    chunks, whole = answers(ids_of(text), "stop", grammar=TOOLS)
    first, *rest = chunks
    assert first["delta"]["role"] == "assistant"
    for chunk in rest:
        assert chunk["delta"]["content"] or chunk["delta"].get("tool_calls") or chunk["finish_reason"]
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("before", ["", "So. ", "a < b "])
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_the_beginning_of_a_call_is_no_content(before: str, finish_reason: str) -> None:
    """Wherever the answer is cut."""
    for length in range(2, len("<tool_call>\n")):
        ids = ids_of(before + CALL[:length]) + [0] * (finish_reason == "stop")
        chunks, whole = answers(ids, finish_reason, grammar=TOOLS, logprobs=0)
        assert "".join(chunk["delta"]["content"] for chunk in chunks) == before == whole["message"]["content"]
        told = [entry["token"] for entry in whole["logprobs"]["content"]]
        assert told == [entry["token"] for chunk in chunks for entry in chunk["logprobs"]["content"]]
        assert "".join(told).startswith(before) and len(told) <= len(ids_of(before)) + 1


@pytest.mark.parametrize(
    ("text", "finish_reason", "content"),
    [("a <", "stop", "a <"), ("a <", "length", "a "), ("a <b", "length", "a <b")],
)
def test_what_begins_no_call_is_content(text: str, finish_reason: str, content: str) -> None:
    ids = ids_of(text) + [0] * (finish_reason == "stop")
    chunks, whole = answers(ids, finish_reason, grammar=TOOLS)
    assert "".join(chunk["delta"]["content"] for chunk in chunks) == content == whole["message"]["content"]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("thought", "said", "finish_reason", "call"),
    [
        ("\nSo it \N{SNOWMAN} is.\n", "Red.", "stop", False),
        ("So", "Red", "length", False),
        ("So it is", None, "length", False),
        ("", CALL, "stop", True),
        ("<tool_call>\n{}", CALL, "stop", True),
    ],
)
def test_reasoning_is_split_from_the_content(
    thought: str, said: str | None, finish_reason: str, call: bool, is_open: bool
) -> None:
    start, end = BEYOND + 1, BEYOND + 2
    ids = [*([] if is_open else [start]), *ids_of(thought)]
    ids += [] if said is None else [end, *ids_of("\n\n"), *ids_of(said)]
    ids += [0] * (finish_reason == "stop")
    thinking = Thinking(start_id=start, end_id=end, is_open=is_open)
    chunks, whole = answers(ids, finish_reason, thinking=thinking, grammar=TOOLS if call else None, logprobs=0)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought.strip()
    assert whole["message"].get("reasoning_content", "") == thought.strip()
    content = "" if call or said is None else said
    assert "".join(delta.get("content", "") for delta in deltas) == content == (whole["message"]["content"] or "")
    assert bool(whole["message"].get("tool_calls")) == call
    assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == content
    assert whole["finish_reason"] == ("tool_calls" if call else finish_reason) == chunks[-1]["finish_reason"]


async def test_an_answer_that_cannot_be_written_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    push = Answer.push

    def written(answer: Answer, *token: Any) -> bytes:
        if answer.options.id == "broken":
            raise OverflowError("no such token")
        return push(answer, *token)

    monkeypatch.setattr(Answer, "push", written)
    async with serving(weights_dir(), "PD") as instance, Link("pd", instance.url) as link:
        broken, fine = await asyncio.gather(
            *(link.ask("/stage/prefill", [encode(completion(name, max_tokens=5))]) for name in ("broken", "fine")),
            return_exceptions=True,
        )
        assert isinstance(broken, ServeError) and broken.status == 500
        assert isinstance(fine, bytes) and json.loads(fine)["choices"]
        await Books({"pd": instance.url}).check()
