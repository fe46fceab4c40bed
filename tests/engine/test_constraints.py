"""Constraints of requests: grammars follow their text, and every choice its own."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from grammars import accepts as lets_pass
from grammars import is_allowed
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.engine.sampling.constraints import restrict
from epd_serve.engine.sampling.grammar import Grammars, ThinkingConstraint
from epd_serve.protocol.openai.tool_format import FORMATS
from epd_serve.protocol.wire import CalledFunction
from epd_serve.sched.sequence import Sequence
from epd_serve.types import Grammar, SamplingParams, Thinking, ToolSchema

TOKENIZER = AutoTokenizer.from_pretrained(weights_dir())
GRAMMARS = Grammars(TOKENIZER, frozenset({TOKENIZER.eos_token_id}))
TOOLS = [
    ToolSchema(name="f", parameters='{"properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    ToolSchema(name="g-2", parameters="{}"),
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>'


def accepts(grammar, text, grammars=GRAMMARS, tokenizer=TOKENIZER):
    return lets_pass(grammars.constraint(grammar), text, tokenizer)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(kind="regex", text="a/b[0-9]"), ["a/b7"], ["a/b", "a/b77", "ab7"]),
        (Grammar(kind="regex", text=r"\d[\d-]\s\w\\d"), ["7- a\\d", "12 _\\d"], ["٧- a\\d", "77 é\\d", "77 a1"]),
        (Grammar(kind="regex", text=r"\D[^\W]"), ["é7", "x_"], ["77", "xé"]),
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


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"$ref": "#/$defs/Kind"},
        "count": {"type": "integer"},
        "may": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["text", "kind"],
    "$defs": {"Kind": {"enum": ["red", "blue"]}},
}
TYPED = [ToolSchema(name="f", parameters=json.dumps(SCHEMA)), ToolSchema(name="g-2", parameters="{}")]
FULL = {"text": 'a <b>\n"}\\é', "kind": "red", "count": 3, "may": None, "list": [True]}
CALLS = [
    CalledFunction("", "f", json.dumps(FULL)),
    CalledFunction("", "g-2", "{}"),
    CalledFunction("", "f", json.dumps({"text": "", "kind": "blue", "may": "5"})),
]


@cache
def with_tokens(name):
    """A tokenizer that has the format's markers as tokens of their own, as models that write it do."""
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    texts = "".join(getattr(FORMATS[name], field.name) for field in fields(FORMATS[name]))
    for token in re.findall(r"</?(?:tool_call|arg_key|arg_value)>|\[[A-Z_]+\]", texts):
        tokenizer.add_tokens([AddedToken(token, special=token[0] == "[", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("with_added", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_lets_calls_of_each_format_pass(name, with_added):
    tokenizer = with_tokens(name) if with_added else TOKENIZER
    grammars = Grammars(tokenizer, frozenset({tokenizer.eos_token_id}))
    format, free = FORMATS[name], Grammar(tools=TYPED, format=name)
    good = [format.write(CALLS), format.write(CALLS[1:]), "so " + format.write(CALLS[:1]), "so", ""]
    wrong = [{"text": "", "kind": "green"}, {"kind": "red"}, {"text": "", "kind": "red", "count": "x"}]
    bad = [format.write([CalledFunction("", "f", json.dumps(one))]) for one in wrong]
    bad += [format.opener, format.write([CalledFunction("", "other", "{}")])]
    for text in (*good, *bad):
        assert accepts(free, text, grammars, tokenizer) == (text in good), text
    for grammar in (Grammar(tools=TYPED, format=name, must_call=True, parallel=False),):
        assert accepts(grammar, format.write(CALLS[:1]), grammars, tokenizer)
        assert not accepts(grammar, format.write(CALLS), grammars, tokenizer)


@pytest.mark.parametrize("name", FORMATS)
@given(
    cuts=st.lists(st.integers(0, 400), max_size=40),
    before=st.sampled_from(["", "so [a] <b "]),
    whole=st.booleans(),
)
def test_calls_are_read_the_same_however_they_come(name, cuts, before, whole):
    """A call that is cut off leaves a beginning of its arguments, and nothing of its markup in the content."""
    text = before + FORMATS[name].write(CALLS)
    if not whole:
        text = text[: len(before) + 2 + (cuts[0] if cuts else 0) % (len(text) - len(before) - 2)]
    reader, places = FORMATS[name].reader(TYPED), sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    read = [reader.push(text[a:b], "length" if b == len(text) else None) for a, b in pairwise(places)]
    assert "".join(piece for piece, _ in read) == before == reader.content
    names, arguments = [], []
    for _, news in read:
        for delta in news:
            if delta.name is not None:
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += delta.arguments
    assert [(call.name, call.arguments) for call in reader.calls] == list(zip(names, arguments, strict=True))
    expected = [call.name for call in CALLS]
    assert names == expected[: len(names)]
    done = arguments if whole else arguments[:-1]
    assert [json.loads(one) for one in done] == [json.loads(call.arguments) for call in CALLS[: len(done)]]
    assert not whole or names == expected


def test_thinking_is_free_up_to_its_budget_and_the_answer_follows_its_grammar():
    start, end, after, word, red = 5, 6, (7,), 8, TOKENIZER.encode("red", add_special_tokens=False)
    for is_open, budget in ((True, 2), (True, None), (False, 2)):
        thinking = Thinking(start_id=start, end_id=end, after_ids=after, is_open=is_open)
        grammar = GRAMMARS.constraint(Grammar(kind="choice", text='["red"]'))
        end_of_answer = TOKENIZER.eos_token_id
        constraint = ThinkingConstraint(thinking, budget, grammar, GRAMMARS.num_tokens, {end_of_answer})
        begun = [] if is_open else [start]
        # (tokens so far, tokens that may follow, tokens that may not)
        steps = [(begun, {word, end}, {end_of_answer}), ([*begun, word], {word, end}, {end_of_answer})]
        if budget:
            steps.append(([*begun, word, word], {end}, {word}))
        thought = [*begun, word, word, end]
        steps += [(thought, {7}, {word, red[0]}), ([*thought, 7], {red[0]}, {word, end})]
        if not is_open:
            steps.insert(0, ([], {start, red[0]}, {word}))
        for ids, good, bad in steps:
            for one in (constraint, constraint.fork()):  # one that goes on, and one made anew
                mask = one.allowed(ids)
                assert {token for token in good | bad if is_allowed(mask, token)} == good


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
