"""Chat templates show the text of every message, and what it spells like a media token stays text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2_5_VLConfig

from epd_serve.demo import weights_dir
from epd_serve.errors import InvalidRequest
from epd_serve.instance.loading.language_weights import read_texts
from epd_serve.instance.text.chat_template import ChatTemplate, MediaLiterals
from epd_serve.instance.text.tokenizer import MARK
from epd_serve.models.loader import load_family
from epd_serve.protocol.openai.messages import FunctionCall, Message, ToolCall, wire_messages
from epd_serve.protocol.openai.tool_format import FORMATS
from epd_serve.protocol.wire import CalledFunction, ChatMessage, Part, PromptOptions

PARTS_ALONE = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %} {{ p['text'] }}{% endfor %}{% endfor %}"
)
STRINGS_ALONE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
EITHER = (
    "{% for m in messages %}[{{ m['role'] }}] {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def template(source: str, *tokens: str) -> ChatTemplate:
    tokenizer: Any = AutoTokenizer.from_pretrained(weights_dir())
    tokenizer.add_tokens(list(tokens))
    tokenizer.chat_template = source
    config: Any = SimpleNamespace(to_dict=dict)
    return ChatTemplate(tokenizer, Path("m"), MediaLiterals(tokenizer, config), {"image": "<image>"})


def message(role: str, *texts: str, image: bool = False) -> ChatMessage:
    parts = [Part(type="text", text=text) for text in texts]
    return ChatMessage(role=role, content=[Part(type="image")] * image + parts)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (PARTS_ALONE, "[user]<image> What is it?"),
        (STRINGS_ALONE, "[user] <image>\nWhat is\nit?"),
        (EITHER, "[user] <image>What isit?"),
    ],
)
def test_texts_and_pictures_are_shown(source: str, shown: str) -> None:
    chat = [message("system", "Be brief."), message("user", "What is", "it?", image=True)]
    assert template(source).render(chat, PromptOptions()) == "[system] Be brief." + shown


def test_a_file_takes_the_place_of_a_models_template(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(STRINGS_ALONE)
    texts = read_texts(weights_dir(), load_family(weights_dir()), template=file)
    shown = texts.template.render([message("user", "<|image_pad|>", image=True)], PromptOptions())
    assert shown.replace(MARK, "") == "[user] <|vision_start|><|image_pad|><|vision_end|>\n<|image_pad|>"
    assert shown.count(MARK) == 1


def test_a_template_that_shows_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="renders no message text"):
        template("{% for m in messages %}[{{ m['role'] }}]{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        STRINGS_ALONE + "{{ 1 // (messages[0]['content'] | length - 3) }}",
        "{% macro all(n) %}{{ all(n) if n == 3 }}{% endmacro %}{{ all(messages[0]['content'] | length) }}"
        + STRINGS_ALONE,
        STRINGS_ALONE + "{% if messages[0]['content'] | length == 3 %}{{ range(1000000) }}{% endif %}",
    ],
)
def test_whatever_a_template_fails_with_is_the_chats_fault(source: str) -> None:
    shown = template(source)
    assert "Hello" in shown.render([message("user", "Hello")], PromptOptions())
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        shown.render([message("user", "Hi!")], PromptOptions())


def test_a_template_gets_the_options_and_tools_of_the_request() -> None:
    effort = PromptOptions(template_kwargs='{"reasoning_effort": "low"}')
    source = STRINGS_ALONE + " {{ reasoning_effort }}"
    assert template(source).render([message("user", "Hi")], effort) == "[user] Hi low"
    tools = '[{"type": "function", "function": {"name": "look_up", "parameters": {}}}]'
    text = template(PARTS_ALONE).render([message("user", "Hi!")], PromptOptions(tools=tools))
    assert "look_up" in text and text.endswith("[user] Hi!"), "also where it shows no tools itself"


CALLS = (
    "{% if tools %}{% endif %}{% for m in messages %}[{{ m['content'] }}"
    '{% for c in m[\'tool_calls\'] or () %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>({{ c.id }}){% endfor %}]{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '[So<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>(c)]'),
        ('{"a":', '[So\n<tool_call>\n{"name": "f", "arguments": {"a":]'),
        ('{"a": "x', '[So\n<tool_call>\n{"name": "f", "arguments": {"a": "x]'),
        ("[1", '[So\n<tool_call>\n{"name": "f", "arguments": [1]'),
    ],
)
def test_a_template_that_reads_arguments_gets_whole_ones(arguments: str, shown: str) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments=arguments))
    chat = [Message(role="assistant", content="So", tool_calls=[call])]
    assert template(CALLS).render(wire_messages(chat), PromptOptions()) == shown


def calls(written: str) -> str:
    """A template that writes a chat's calls."""
    each = "{% for c in m.tool_calls or () %}" + written + "{% endfor %}"
    return "{% if tools %}{% endif %}{% for m in messages %}[{{ m['content'] }}" + each + "]{% endfor %}"


XML = (
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM = (
    "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
)
NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
MISTRAL = NINE + '[TOOL_CALLS][{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}]'
ARGS = NINE + "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("written", "format", "warns"),
    [
        (XML, "qwen_xml", False),
        (GLM, "glm", False),
        (GLM.replace("\n", ""), "glm_compact", False),
        (MISTRAL, "mistral_v7", False),
        (ARGS, "mistral_args", False),
        ("({{ c.function.name }}: {{ c.function.arguments }})", "hermes", True),
    ],
)
def test_the_format_of_calls_is_read_from_the_template(
    written: str, format: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shown = template(calls(written))
    assert shown.tool_format == format and bool(caplog.records) == warns
    called = CalledFunction(id="call_1", name="look_up", arguments='{"word": "fox"}')
    chat = [message("user", "Hi"), ChatMessage(role="assistant", content=[], tool_calls=[called])]
    text = shown.render(chat, PromptOptions(tools='[{"type": "function", "function": {"name": "look_up"}}]'))
    assert FORMATS[format].write([called]) in re.sub(r', "id": "\w{9}"|\[CALL_ID\]\w{9}', "", text)


@pytest.mark.parametrize(("spelled", "thinks"), [("</think>", True), ("</thought>", False)])
def test_a_template_that_shows_thoughts_thinks(spelled: str, thinks: bool) -> None:
    source = STRINGS_ALONE + "{% if add_generation_prompt %}<think>" + spelled + "{% endif %}"
    shown = template(source, "<think>", "</think>")
    found, tokenizer = shown.thinking, AutoTokenizer.from_pretrained(weights_dir())
    tokenizer.add_tokens(["<think>", "</think>"])
    assert (found is not None) == thinks
    assert found is None or tokenizer.decode([found.start_id, found.end_id]) == "<think></think>"


MEDIA = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
OTHERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PIECES = st.sampled_from([*MEDIA, *OTHERS, "<|", "|>", "<|image_pad|", " red", "é ", "\n", "<\ue000|image_pad|>"])


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(weights_dir())


@cache
def literals() -> MediaLiterals:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer().convert_tokens_to_ids(MEDIA), strict=True))
    return MediaLiterals(tokenizer(), Qwen2_5_VLConfig(**ids))


@given(st.lists(st.tuples(st.booleans(), st.lists(PIECES, max_size=4).map("".join)), max_size=6))
def test_what_a_user_writes_is_text_and_what_a_template_writes_is_not(parts: list[tuple[bool, str]]) -> None:
    whole = "".join(text for _, text in parts)
    marked = iter(literals().marked({"role": [text for is_users, text in parts if is_users]})["role"])
    rendered = "".join(next(marked) if is_users else text for is_users, text in parts)
    ids = [one for piece in rendered.split(MARK) for one in tokenizer().encode(piece, add_special_tokens=False)]
    assert tokenizer().decode(ids, skip_special_tokens=False) == whole
    for name, token in zip(MEDIA, tokenizer().convert_tokens_to_ids(MEDIA), strict=True):
        assert ids.count(token) == rendered.count(name)
