"""Constraints of requests: grammars follow their text, and every choice its own."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.engine.sampling.constraints import restrict
from epd_serve.engine.sampling.grammar import Grammars
from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.tool_format import ToolCallReader
from epd_serve.sched.sequence import Sequence
from epd_serve.types import Grammar, SamplingParams, ToolSchema

TOKENIZER = AutoTokenizer.from_pretrained(weights_dir())
GRAMMARS = Grammars(TOKENIZER, frozenset({TOKENIZER.eos_token_id}))
TOOLS = [
    ToolSchema(name="f", parameters='{"properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    ToolSchema(name="g-2", parameters="{}"),
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>'


def is_allowed(mask, token):
    return bool(mask[token // 32] >> (token % 32) & 1)


def accepts(grammar, text):
    """Whether the grammar lets the text pass, token by token, and may end behind it."""
    constraint, ids = GRAMMARS.constraint(grammar), TOKENIZER.encode(text, add_special_tokens=False)
    for count, token in enumerate(ids):
        if not is_allowed(constraint.allowed(ids[:count]), token):
            return False
    return is_allowed(constraint.allowed(ids), TOKENIZER.eos_token_id)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(kind="regex", text="a/b[0-9]"), ["a/b7"], ["a/b", "a/b77", "ab7"]),
        (Grammar(kind="choice", text='["no", "a \\"b\\"\\n"]'), ["no", 'a "b"\n'], ["n", "nono"]),
        (Grammar(kind="json", text='{"type": "object"}'), ["{}", '{"a": [1, null]}'], ["[]", '{"a"}']),
        (Grammar(kind="json", text="{}"), ["{}", "[]", "3", '"x"'], ["x", ""]),
        (Grammar(tools=TOOLS), ["hi <b>", "", CALL, f"so: {CALL}\n{OTHER}"], ["<tool_call>\n{}", CALL + "."]),
        (Grammar(tools=TOOLS, parallel=False), ["hi", CALL], [f"{CALL}\n{OTHER}"]),
        (Grammar(tools=TOOLS, must_call=True), [CALL, f"{CALL}\n{OTHER}"], ["", "hi", "hi" + CALL]),
        (Grammar(kind="json", text='{"type": "object"}', tools=TOOLS), ["{}", CALL], ["hi", "hi" + CALL]),
    ],
)
def test_a_grammar_lets_pass_what_it_should(grammar, good, bad):
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="(?=a)b"),
        Grammar(kind="json", text='{"type": "string", "pattern": "(?=a)b"}'),
        Grammar(kind="json", text='{"not": {}}', strict=True),
        Grammar(tools=[ToolSchema("f", '{"propertyNames": {"pattern": "a"}}', True)]),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammar):
    with pytest.raises(InvalidRequest):
        GRAMMARS.constraint(grammar)


A, B, C = {"a": {"const": 1}}, {"b": {"const": 2}}, {"c": {"const": 3}}
DEFS = {"$defs": {"D": {"properties": A}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": A}, ['{"a": 1}', "{}"], ['{"a": 1, "x": 0}', '{"x": 0}']),
        ({"properties": A, "required": ["a"]}, ['{"a": 1}'], ["{}", '{"a": 1, "x": 0}']),
        ({"properties": A, "additionalProperties": True}, ['{"a": 1, "x": 0}'], ['{"a": 2}']),
        ({"properties": A, "additionalProperties": {"type": "null"}}, ['{"x": null}'], ['{"x": 0}']),
        ({}, ['{"x": 0}'], []),
        ({"additionalProperties": {"type": "null"}}, ['{"x": null}'], ['{"x": 0}']),
        ({"properties": {"in": {"properties": A}}}, ['{"in": {"a": 1}}'], ['{"in": {"x": 0}}']),
        ({"properties": {"in": {"$ref": "#/$defs/D"}}, **DEFS}, [], ['{"in": {"x": 0}}']),
        ({"anyOf": [{"properties": A}, {"properties": B}]}, ['{"a": 1}', '{"b": 2}'], ['{"x": 0}']),
        # keys of one schema that another one beside it does not declare
        ({"allOf": [{"properties": A}, {"properties": B}]}, ['{"a": 1, "b": 2}'], ['{"a": 2}']),
        ({"properties": A, "anyOf": [{"properties": B}, {"properties": C}]}, ['{"a": 1, "b": 2}'], []),
        ({"allOf": [{"$ref": "#/$defs/D"}, {"properties": B}], **DEFS}, ['{"a": 1, "b": 2}'], []),
        ({"properties": A, "anyOf": [{"required": ["a"]}, {}]}, ['{"a": 1}'], ['{"x": 0}']),
        ({"properties": A, "required": ["b"]}, ['{"a": 1, "b": 0}'], ['{"a": 1}']),
        # data is no schema
        ({"enum": [{"properties": {}}]}, ['{"properties": {}}'], ["{}"]),
    ],
)  # fmt: skip
def test_declared_keys_alone_are_written(schema, good, bad):
    schema = {"type": "object", **schema}
    grammar = Grammar(kind="json", text=json.dumps(schema))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 40))
def test_a_constraint_made_anew_stands_where_the_old_one_does(seed, num_steps):
    """As on the decode instance, after a preemption, and on an instance that goes on with an answer."""
    grammar = Grammar(kind="json", text='{"type": "object", "properties": {"a": {"type": "array"}}}', tools=TOOLS)
    old, rng, ids = GRAMMARS.constraint(grammar), np.random.default_rng(seed), []
    for _ in range(num_steps):
        mask = old.allowed(ids)
        allowed = [token for token in range(len(TOKENIZER)) if is_allowed(mask, token)]
        token = int(rng.choice(allowed))
        if token == TOKENIZER.eos_token_id:
            break
        forked = old.fork()
        ids.append(token)
        assert (GRAMMARS.constraint(grammar).allowed(ids) == forked.allowed(ids)).all()
    assert old.error == ""


def test_only_the_rows_that_ask_are_restricted():
    [a, b] = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "ab")
    rows = [
        Sequence(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=9, positions=None, output_ids=[5])
        for sampling in (
            SamplingParams(seed=0),
            SamplingParams(seed=0, logit_bias={a: 3.0, 10**6: 1.0}),
            SamplingParams(seed=0, allowed_token_ids=(a, b)),
            SamplingParams(seed=0, bad_word_ids=((5, a), (6, b), (b,))),
            SamplingParams(seed=0),
        )
    ]
    rows[4].output_ids = []
    rows[4].constraint = GRAMMARS.constraint(Grammar(kind="choice", text='["ab", "b"]'))
    scores = torch.zeros(5, len(TOKENIZER) + 7)
    restrict(scores, rows)
    possible = [set((row > float("-inf")).nonzero().flatten().tolist()) for row in scores]
    everything = set(range(len(TOKENIZER) + 7))
    assert possible[0] == everything and scores[0].abs().sum() == 0
    assert scores[1, a] == 3 and scores[1].sum() == 3
    assert possible[2] == {a, b}
    assert possible[3] == everything - {a, b}
    assert {a, b} <= possible[4] and all(TOKENIZER.decode([t])[0] in "ab" for t in possible[4])


@given(
    cuts=st.lists(st.integers(0, 400), max_size=40),
    text=st.sampled_from([f"so {CALL}\n{OTHER}", CALL, "a <tool_x"]),
)
def test_calls_are_read_the_same_however_they_come(cuts, text):
    whole, pieces = ToolCallReader(), ToolCallReader()
    content, deltas = whole.push(text, "stop")
    places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    read = [pieces.push(text[a:b], "stop" if b == len(text) else None) for a, b in pairwise(places)]
    assert "".join(piece for piece, _ in read) == content == whole.content
    assert pieces.calls == whole.calls and len(whole.calls) == text.count("<tool_call>")
    arguments = [""] * len(whole.calls)
    for _, news in read:
        for delta in news:
            arguments[delta.index] += delta.arguments
    assert arguments == [call.arguments for call in whole.calls]
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls) and len(deltas) >= len(
        arguments
    )


TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=6).map(tuple)


@given(
    words=WORDS, outputs=st.lists(st.lists(TOKENS, max_size=12), min_size=2, max_size=2), forked=st.integers(0, 9)
)
def test_bad_words_are_banned_where_their_other_tokens_end_the_output(words, outputs, forked):
    sampling = SamplingParams(seed=0, bad_word_ids=words)
    sequence = Sequence(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=99, positions=torch.empty(0))
    choices = [sequence, sequence.fork(1, [])]
    for count in range(forked, 13):  # one that is taken over begins with some tokens
        for choice, output in zip(choices, outputs, strict=True):
            choice.output_ids = output[:count]
        scores = torch.zeros(2, 3)
        restrict(scores, choices)
        for choice, row in zip(choices, scores, strict=True):
            ended = [1 - len(word) for word in words]
            banned = {
                word[-1]
                for word, start in zip(words, ended, strict=True)
                if len(word) == 1 or tuple(choice.output_ids[start:]) == word[:-1]
            }
            assert {token for token in range(3) if row[token] == float("-inf")} == banned
