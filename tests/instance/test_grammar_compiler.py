"""A grammar that takes long to compile is refused, and keeps nobody waiting."""

import json
import time
from functools import partial

import grammars
import pytest
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.engine.sampling.grammar import Grammars
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.grammar_compiler import GrammarCompiler
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.telemetry.span import SpanStream
from epd_serve.types import Grammar, ToolSchema

TOKENIZER = AutoTokenizer.from_pretrained(weights_dir())


def call(arguments, name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def grammar(schema) -> Grammar:
    return Grammar(kind="json", text=json.dumps(schema), param="response_format")


def wide(number, **more) -> Grammar:
    return grammar({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)}, **more})


#: Takes several seconds.
BOMB = wide(8000)


@pytest.fixture
async def compiler():
    processor = RequestProcessor(1, queue_timeout_s=300, spans=SpanStream())
    decoders = DecoderPool(cpu_s=2.0, limits=MediaLimits(max_pixels=1024, max_bytes=1024))
    one = GrammarCompiler(Grammars(TOKENIZER, {TOKENIZER.eos_token_id}), processor, decoders)
    one.tried, compile_ = [], decoders.compile

    async def watched(texts, place, *, cpu_s):
        one.tried.append((texts, cpu_s))
        return await compile_(texts, place, cpu_s=cpu_s)

    decoders.compile = watched
    yield one
    await processor.close()
    decoders.close()


async def test_a_grammar_that_takes_long_is_refused_once_and_for_all(compiler):
    for _ in range(3):
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.compile(BOMB)
        assert (refusal.value.code, refusal.value.param) == ("structure_too_complex", "response_format")
    assert len(compiler.tried) == 1


async def test_usual_grammars_are_compiled_and_short_ones_in_no_other_process(compiler):
    short = await compiler.compile(wide(3))
    assert not compiler.tried and short.allowed([]).any()
    for one in (wide(250), grammar({"anyOf": [{"type": "string"}, {"type": "null"}]})):
        assert (await compiler.compile(one)).allowed([]).any()
        num_tried = len(compiler.tried)
        assert num_tried and (await compiler.compile(one)).allowed([]).any()
        assert len(compiler.tried) == num_tried


#: Keywords that the grammar engine lacks, in a schema that says something else as well.
LACKING = [
    {"propertyNames": {"pattern": "^[a-z]+$"}},
    {"not": {"required": ["b"]}},
    {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["a"]}},
    {"dependentRequired": {"a": ["b"]}},
    {"properties": {"a": {"type": "string", "format": "cidr"}}},
    {"properties": {"a": {"type": "string", "pattern": "^(?=.*x)[a-z]+$"}}},
    {"properties": {"a": {"type": "string", "pattern": "^(a|b)\\1$"}}},
    {"properties": {"a": {"type": "string", "pattern": "\\bx\\b"}}},
    {"properties": {"a": {"type": "string", "pattern": "^\\\\(?>a)\\Z"}}},
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"properties": {"a": {"type": "array", "contains": {"const": 1}}}},
    {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}},
]


def object_of(more):
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, **more.get("properties", {})}
    return {"type": "object", "required": ["b"], **more, "properties": properties}


accepts = partial(grammars.accepts, tokenizer=TOKENIZER)


async def test_what_cannot_be_enforced_is_left_out_and_the_rest_is_enforced(compiler):
    for more in LACKING:
        schema = object_of(more)
        constraint = await compiler.compile(grammar(schema))
        assert accepts(constraint, '{"b": 1}')
        assert not accepts(constraint, "{}") and not accepts(constraint, '{"b": 1, "c": 1}')
        tool = ToolSchema("f", json.dumps(schema))
        for must_call in (False, True):
            constraint = await compiler.compile(Grammar(tools=[tool], must_call=must_call, param="tools"))
            assert accepts(constraint, call('{"b": 1}')) and not accepts(constraint, call("{}"))
            # another instance goes on with what was made of it, without trying anything
            tried = len(compiler.tried)
            assert accepts(await compiler.compile(constraint.grammar, is_tried=True), call('{"b": 1}'))
            assert len(compiler.tried) == tried


async def test_what_only_looks_like_look_around_or_a_back_reference_is_enforced(compiler):
    for pattern, wanted in ((r"^\\1$", r"\1"), (r"^f\(?=1$", "f=1")):
        constraint = await compiler.compile(grammar({"type": "string", "pattern": pattern}))
        assert accepts(constraint, json.dumps(wanted)) and not accepts(constraint, '"x"')


async def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name(compiler):
    for more in LACKING:
        schema = json.dumps(object_of(more))
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.compile(Grammar(kind="json", text=schema, strict=True, param="response_format"))
        assert (refusal.value.code, refusal.value.param) == ("unsupported_structure", "response_format")
        tools = [ToolSchema("fine", "{}"), ToolSchema("faulty", schema, True)]
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.compile(Grammar(tools=tools, param="tools"))
        assert (refusal.value.code, refusal.value.param) == ("unsupported_structure", "tools")
        assert "'faulty'" in refusal.value.message
        keyword = next(word for word in KEYWORDS if word in schema)
        assert keyword in refusal.value.message


KEYWORDS = (
    "propertyNames",
    "not",
    "then",
    "dependentRequired",
    "cidr",
    "(?=",
    "(a|b)",
    "bx",
    "(?>",
    "unique",
    "contains",
    "oneOf",
)
#: Schemas that say nothing, or too much.
IMPOSSIBLE = [
    {"type": "zebra"},
    {"$ref": "http://somewhere/else"},
    {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?:a?){300}a{300}$"}},
        "required": ["a"],
    },
]


async def test_a_tool_that_may_be_called_never_refuses_the_chat(compiler):
    for schema in IMPOSSIBLE:
        tools = [ToolSchema("f", json.dumps(schema)), ToolSchema("g", json.dumps(object_of({})))]
        constraint = await compiler.compile(Grammar(tools=tools, param="tools"))
        assert accepts(constraint, call('{"x": 1}')) and accepts(constraint, "hello")
        assert not accepts(constraint, call("{}", "g"))
        for one in (Grammar(tools=tools, must_call=True, param="tools"), grammar(schema)):
            with pytest.raises(InvalidRequest) as refusal:
                await compiler.compile(one)
            assert refusal.value.code in ("unsupported_structure", "structure_too_complex")


EXPLODING = [
    Grammar(kind="regex", text="(?:a?){300}a{300}"),
    Grammar(kind="regex", text="(a|aa|aaa|aaaa){200}"),
    Grammar(kind="regex", text="((a{1,100}){1,100}){1,100}"),
    grammar({"anyOf": [{"pattern": f"^(.*{i % 7}.*){{{i % 5 + 3}}}{i}$", "type": "string"} for i in range(40)]}),
    grammar({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(9)]}),
    grammar({"patternProperties": {f"(a|b)*a(a|b){{{i}}}": {} for i in range(9)}, "type": "object"}),
]  # fmt: skip


@pytest.mark.parametrize("one", EXPLODING, ids=lambda one: one.text[:30])
async def test_a_pattern_that_explodes_is_refused_within_bounded_time(compiler, one):
    await compiler.compile(wide(250))  # the other processes are up
    own_s, num_tried = time.process_time(), set[int]()
    for _ in range(20):
        with pytest.raises(InvalidRequest):
            await compiler.compile(one)
        num_tried.add(len(compiler.tried))
    assert time.process_time() - own_s < 0.3
    assert len(num_tried) == 1


async def test_all_trials_of_a_request_share_one_bound(compiler):
    tools = [ToolSchema("f", wide(250).text), ToolSchema("g", json.dumps(IMPOSSIBLE[0]))]
    await compiler.compile(Grammar(tools=tools, param="tools"))
    first, second = (cpu_s for _, cpu_s in compiler.tried)
    assert second < first == 0.5


async def test_where_tools_take_too_much_together_none_is_enforced(compiler):
    tools = [ToolSchema("f", BOMB.text), ToolSchema("g", json.dumps(object_of({})))]
    constraint = await compiler.compile(Grammar(tools=tools, param="tools"))
    assert accepts(constraint, call("{}")) and accepts(constraint, call('{"x": 1}', "g"))
