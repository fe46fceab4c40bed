"""Request bodies that are expensive to read, with the path that takes them and the status that they get."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_SHORT = '{"role":"user","content":"hi"}'
_DATA = "data:image/png;base64,"
_PIXEL = _DATA + "AAAA"
LIMIT = 64 * 1024 * 1024 - 1024


def _chat(**fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})


def _messages(message: str, number: int) -> str:
    return '{"messages":[' + ",".join([message] * number) + "]}"


def _schema(schema: Any) -> str:
    return _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, max_tokens=1
    )


def _tokens(token: str, number: int) -> str:
    return '{"prompt":[' + ",".join([token] * number) + '],"max_tokens":1}'


def _call(arguments: str) -> str:
    return json.dumps({"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}})


def _parts(part: str, number: int) -> str:
    return _messages('{"role":"user","content":[' + ",".join([part] * number) + "]}", 1)


def _picture(url: str, **fields: Any) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], **fields})


_PICTURE = json.dumps({"type": "image_url", "image_url": {"url": _PIXEL}})
_PART = '{"type":"text","text":"a"}'

#: Name → (path, status, the body's text).
HOSTILE: dict[str, tuple[str, int, Callable[[], str]]] = {
    "a million messages": (CHAT, 413, lambda: _messages(_SHORT, 1_000_000)),
    "100,000 messages": (CHAT, 413, lambda: _messages(_SHORT, 100_000)),
    "5,000 messages": (CHAT, 400, lambda: _messages(_SHORT, 5000)),
    "messages of nothing": (CHAT, 413, lambda: _messages("{}", 2_000_000)),
    "16,000 wrong messages": (CHAT, 400, lambda: _messages("{}", 16_000)),
    "100,000 pictures": (CHAT, 413, lambda: _messages(f'{{"role":"user","content":[{_PICTURE}]}}', 100_000)),
    "5,000 pictures": (CHAT, 400, lambda: _parts(_PICTURE, 5000)),
    "data URLs": (CHAT, 413, lambda: '{"user":[' + ",".join(['"data:"'] * 1_000_000) + "]}"),
    "10,000 parts": (CHAT, 413, lambda: _parts(_PART, 16_500)),
    "calls": (
        CHAT,
        400,
        lambda: _messages('{"role":"assistant","tool_calls":[' + ",".join([_call("{}")] * 5000) + "]}", 1),
    ),
    "lists in arguments": (
        CHAT,
        413,
        lambda: _messages(
            '{"role":"assistant","tool_calls":[' + _call('{"a":[' + "[]," * 1_000_000 + "[]]}") + "]}", 1
        ),
    ),
    "wrong tokens": (COMPLETION, 400, lambda: _tokens("-1", 262_000)),
    "ten million tokens": (COMPLETION, 413, lambda: _tokens("1", 10_000_000)),
    "prompts": (COMPLETION, 400, lambda: _tokens('"a"', 260_000)),
    "unknown fields": (CHAT, 400, lambda: _chat(**{f"u{i}": 1 for i in range(50_000)})),
    "few unknown fields": (CHAT, 400, lambda: _chat(**{f"u{i}": 1 for i in range(4000)})),
    "a field with a long name": (CHAT, 400, lambda: _chat(**{"temperatur" * 800_000: 1})),
    "a role with a long name": (CHAT, 400, lambda: _messages('{"role":"' + "user" * 2_000_000 + '"}', 1)),
    "biases": (CHAT, 400, lambda: _chat(logit_bias={str(i): 1000 for i in range(50_000)})),
    "input items": (RESPONSES, 413, lambda: '{"input":[' + ",".join([_SHORT] * 1_000_000) + "]}"),
    "5,000 input items": (RESPONSES, 400, lambda: '{"input":[' + ",".join([_SHORT] * 5000) + "]}"),
    "quotation marks": (CHAT, 400, lambda: '[{"a":' + '"' * (8 << 20)),
    "brackets": (CHAT, 413, lambda: "[" * LIMIT),
    "escapes": (CHAT, 400, lambda: '{"' + "\\" * ((8 << 20) - 10)),
    "texts to detokenize": ("/detokenize", 400, lambda: '{"tokens":[' + ",".join(["-1"] * 262_000) + "]}"),
    "messages to tokenize": ("/tokenize", 413, lambda: _messages(_SHORT, 1_000_000)),
    "a picture and a wrong field": (CHAT, 400, lambda: _picture(_DATA + "A" * (LIMIT - 2048), temprature=1)),
}
