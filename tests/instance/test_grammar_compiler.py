"""A grammar that takes long to compile is refused, and keeps nobody waiting."""

import asyncio
import json
import time

import pytest
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.engine.sampling.grammar import Grammars
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.grammar_compiler import GrammarCompiler
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.types import Grammar


def grammar(schema) -> Grammar:
    return Grammar(kind="json", text=json.dumps(schema), param="response_format")


def wide(number, **more) -> Grammar:
    return grammar({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)}, **more})


#: Takes several seconds.
BOMB = wide(8000)


@pytest.fixture
async def compiler():
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    processor = RequestProcessor(1, queue_timeout_s=300)
    decoders = DecoderPool(1, cpu_s=2.0, limits=MediaLimits(max_pixels=1024, max_bytes=1024))
    one = GrammarCompiler(Grammars(tokenizer, {tokenizer.eos_token_id}), processor, decoders)
    one.tried, compiled = [], decoders.compiled

    async def watched(text, place):
        one.tried.append(text)
        return await compiled(text, place)

    decoders.compiled = watched
    yield one
    await processor.close()
    decoders.close()


async def test_a_grammar_that_takes_long_is_refused_once_and_for_all(compiler):
    for _ in range(3):
        with pytest.raises(InvalidRequest, match=r"took more than 0\.5 s of processor time") as refusal:
            await compiler.compile(BOMB)
        assert (refusal.value.code, refusal.value.param) == ("structure_too_complex", "response_format")
    assert len(compiler.tried) == 1


async def test_usual_grammars_are_compiled_and_short_ones_in_no_other_process(compiler):
    short = await compiler.compile(wide(3))
    assert not compiler.tried and short.allowed([]).any()
    for one in (wide(250), grammar({"anyOf": [{"type": "string"}, {"type": "null"}]})):
        for _ in range(2):
            assert (await compiler.compile(one)).allowed([]).any()
    assert len(compiler.tried) == 2


async def test_what_cannot_be_compiled_is_explained_as_ever(compiler):
    for schema in ({"not": {}}, {"anyOf": [{"not": {}}]}, {"not": {}, "description": "x" * 5000}):
        with pytest.raises(InvalidRequest, match=r"response_format: this structure is not supported: ."):
            await compiler.compile(grammar(schema))


async def test_nobody_waits_for_a_grammar_that_takes_long(compiler):
    ended = []

    async def compile(name, one):
        try:
            await compiler.compile(one)
        except InvalidRequest as error:
            assert error.code == "structure_too_complex"
        ended.append(name)

    bombs = [asyncio.create_task(compile("bomb", wide(8000, title=str(number)))) for number in range(6)]
    await asyncio.sleep(0)
    for number in range(5):
        await compile("usual", wide(3 + number))
    assert ended.count("bomb") < 6, "they were all waited for"
    await asyncio.gather(*bombs)


async def test_the_instance_spends_little_on_what_is_refused(compiler):
    await compiler.compile(wide(250))  # the other processes are up
    start_s = time.process_time()
    with pytest.raises(InvalidRequest):
        await compiler.compile(BOMB)
    assert time.process_time() - start_s < 0.5, "to compile it takes several seconds"
