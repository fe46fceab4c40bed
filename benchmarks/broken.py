"""Broken input: requests made of valid ones, each to get an answer or a clear 4xx, and frames of links."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from contextlib import suppress
from typing import Any

import msgspec

from epd_serve.rpc.cluster import CallerGreeting, Endpoint
from epd_serve.rpc.messages import OPENING, Call, Cancel, Credit, pack
from epd_serve.verify.client import CHAT, Client, Reply
from epd_serve.verify.items import asked, picture

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "f", "parameters": _SCHEMA}
_DEEP = 3000
#: Seconds after which a request counts as hanging.
HANG_S = 60.0


def valid_bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that a server with all of these APIs answers with 200, each with few tokens."""
    text = [{"role": "user", "content": "How many apples?"}]
    parts = asked(picture("red", (40, 30)), text="What is it?")
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [_call()]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    tool = {"type": "function", "function": _FUNCTION}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
    penalties = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"40": 5},
    }
    chat, turn = CHAT, [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": text, "max_tokens": 2, "temperature": 0}),
        (chat, {"messages": text, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
        (chat, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "seed": 1, "stop": ["x"]}),
        (chat, {"messages": history, "tools": [tool], "tool_choice": "auto", "max_tokens": 2}),
        (chat, {"messages": text, "response_format": schema, "max_completion_tokens": 16}),
        (chat, {"messages": text, "n": 2, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "top_p": 0.9}),
        (chat, {"messages": text, "max_tokens": 2, **penalties}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "echo": True}),
        ("/v1/completions", {"prompt": [[40, 41], [42]], "max_tokens": 1, "logprobs": 1, "n": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "[a-c]{2}"}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "bad_words": ["x"], "allowed_token_ids": [40, 41]}),
        ("/v1/responses", {"input": turn, "max_output_tokens": 2, "metadata": {"a": "b"}, "store": False}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "tools": [{"type": "function", **_FUNCTION}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": parts}], "return_token_strs": True}),
        ("/tokenize", {"prompt": "Hi there", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [40, 41, 42]}),
    ]
    return [(path, {"model": model, **body}) for path, body in bodies]


def _call() -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}


#: Values that a field may not expect.
NASTY: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -0.0, 0.1),
    *("", "x", "\x00", "\ud800", "é" * 50, "a" * 5000, "<|image_pad|>", "<tool_call>\n", "{{ messages }}"),
    *("data:image/png;base64,AAAA", "data:image/png;base64,%%%", "http://127.0.0.1:1/x.png", "file:///etc/passwd"),
    *("gopher://x", [], {}, [[]], [None], ["x", 1], {"": ""}, {"type": "text"}, {"$ref": "#"}, [0] * 3000),
    {"anyOf": [{"$ref": "#"}]},
    {"type": "string", "pattern": "(a{1,9000}){9000}"},
    {"type": "array", "minItems": 10**9},
]


def broken_request(rng: random.Random, valid: list[tuple[str, dict[str, Any]]]) -> tuple[str, bytes]:
    """Return (path, body) of a valid request with up to three changes, and in one of five cases damaged bytes."""
    path, body = rng.choice(valid)
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _change(rng, body)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return path, _damaged(rng, data) if rng.random() < 0.2 else data


def _change(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one thing, somewhere inside."""
    holder: Any = body
    while True:
        places: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not places:
            return
        place = rng.choice(places)
        if not (isinstance(holder[place], dict | list) and holder[place] and rng.random() < 0.6):
            break
        holder = holder[place]
    what = rng.random()
    if what < 0.6:
        holder[place] = copy.deepcopy(rng.choice(NASTY))
    elif what < 0.75:
        del holder[place]
    elif what < 0.85 and isinstance(holder, list):
        holder.extend([holder[place]] * rng.choice((1, 3, 200)))
    elif isinstance(holder, dict):
        holder[rng.choice(("x", "", "stream", "n", "seed", "temperature", "messages"))] = copy.deepcopy(
            rng.choice(NASTY)
        )


def _damaged(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(9)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + rng.randbytes(rng.choice((1, 8))) + data[place + 1 :]
    if kind == 2:  # the same key twice
        return data[:1] + b'"max_tokens": 1, "max_tokens": "x", ' + data[1:]
    if kind == 3:
        return data[:1] + b'"temperature": %b, ' % rng.choice((b"NaN", b"Infinity", b"1e999", b"-")) + data[1:]
    if kind == 4:
        return data[:1] + b'"metadata": ' + b"[" * _DEEP + b"]" * _DEEP + b", " + data[1:]
    if kind == 5:
        return data[:1] + b'"tools": ' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b", " + data[1:]
    if kind == 6:
        return data[:1] + b'"seed": ' + b"9" * 5000 + b", " + data[1:]
    if kind == 7:
        return data[:1] + b'"user": "\\ud800\\udbff", "stop": "\\udc00", ' + data[1:]
    return b"[" * _DEEP + data


def answer_problem(status: int, content_type: str, answer: bytes) -> str:
    """The fault of an answer, whatever the request was; "" where there is none."""
    if status >= 500:
        return f"status {status}"
    if content_type.startswith("text/event-stream"):
        last = ([event for event in answer.split(b"\n\n") if event] or [b""])[-1]
        ended = last == b"data: [DONE]" or last.startswith(b"event: response.")
        return "" if status == 200 and ended else "a stream without an end"
    try:
        body = json.loads(answer)
    except ValueError:
        return "an answer that is no JSON"
    if status == 200:
        return "" if isinstance(body, dict) and "error" not in {k for k, v in body.items() if v} else "no answer"
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error):
        return "an error of another shape than OpenAI's"
    return "" if len(str(error["message"])) > 10 else "an error that says nothing"


async def find_problem(client: Client, path: str, body: bytes) -> str:
    """Send a request; return what is wrong with its answer, or nothing."""
    reply = Reply()
    await client.send(reply, body, path, HANG_S)
    if reply.failure:
        return reply.failure
    return answer_problem(reply.status, reply.headers.get("content-type", ""), reply.body)


async def is_answered(client: Client, path: str, body: dict[str, Any]) -> bool:
    """Whether a request gets a 200."""
    reply = Reply()
    await client.send(reply, json.dumps(body).encode(), path, HANG_S)
    return reply.status == 200


#: Calls whose arguments a frame may carry; not those that change an instance's role.
_PATHS = (
    *("/stage/encode", "/stage/prefill", "/stage/decode", "/prompt/tokenize", "/prompt/detokenize"),
    *("/kv/reserve", "/kv/announce", "/kv/renew", "/kv/complete", "/kv/cancel", "/feature/event", "/nowhere", ""),
)
_FIELDS = (
    "request_id",
    "transfer_id",
    "items",
    "messages",
    "prompt",
    "sampling",
    "ref",
    "media",
    "region",
    "parts",
)


def broken_frames(rng: random.Random) -> bytes:
    """Return one to eight frames after a link's greeting: calls with nonsense, some of them damaged."""
    data = b""
    for number in range(rng.randint(1, 8)):
        body = msgspec.msgpack.encode(
            {rng.choice(_FIELDS): _wire_value(rng.choice(NASTY)) for _ in range(rng.randrange(4))}
        )
        message = rng.choice(
            (
                Call(rng.choice((number, 0, -1)), rng.choice(_PATHS), memoryview(body)),
                Credit(number, rng.choice((-1, 0, 1 << 62))),
                Cancel(number),
            )
        )
        frame = bytes(pack([message] * rng.choice((1, 1, 2))))
        data += _damaged_frame(rng, frame) if rng.random() < 0.5 else frame
    return data


def _wire_value(value: Any) -> Any:
    """Return a value that MessagePack can carry."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return value


def _damaged_frame(rng: random.Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame))
    kind = rng.randrange(5)
    if kind == 0:
        return frame[:place]
    if kind == 1:
        return frame[:place] + rng.randbytes(rng.choice((1, 4, 64))) + frame[place + 1 :]
    if kind == 2:  # another length than the frame has
        return rng.choice((0, 1, len(frame), 1 << 28, (1 << 32) - 1)).to_bytes(4, "little") + frame[4:]
    if kind == 3:
        deep = b"\x91" * 2000
        return len(deep).to_bytes(4, "little") + deep
    return rng.randbytes(rng.randint(1, 200))


async def send_frames(service: Any, host: str, port: int, rng: random.Random) -> None:
    """Greet a link's server or a data port, sometimes wrongly, and send broken frames."""
    hello = OPENING + pack(CallerGreeting(None, Endpoint(service, f"{host}:{port}"), "fuzz").hello)
    data = hello + pack(("",)) + broken_frames(rng)
    if rng.random() < 0.2:
        data = _damaged_frame(rng, data)
    reader, writer = await asyncio.open_connection(host, port)
    with suppress(OSError):
        writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1 << 16)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
