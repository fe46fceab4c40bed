"""The suite ``api``: OpenAI's types, streams, errors and cancellation."""

from __future__ import annotations

import asyncio

from epd_serve.verify.check import Skipped, check, require
from epd_serve.verify.client import Client, Reply
from epd_serve.verify.items import asked, picture

_OPENAI = "OpenAI's API reference"
_FINISH = ("stop", "length", "tool_calls", "content_filter")


@check("api", _OPENAI)
async def models(client: Client) -> None:
    """The model is listed under /v1/models."""
    listed = (await client.get("/v1/models")).json()
    require(listed.get("object") == "list", "object is not 'list'")
    require(client.model in [one.get("id") for one in listed.get("data", ())], f"{client.model} is not listed")


@check("api", _OPENAI)
async def types(client: Client) -> None:
    """A plain answer has all fields of OpenAI's, with their types."""
    reply = await client.chat()
    choice, answer = reply.choices()[0], reply.json()
    require(answer.get("object") == "chat.completion", f"object is {answer.get('object')!r}")
    require(isinstance(answer.get("id"), str) and type(answer.get("created")) is int, "id or created is wrong")
    require(answer.get("model") == client.model, f"model is {answer.get('model')!r}")
    require(choice["message"].get("role") == "assistant", "the role is not 'assistant'")
    require(choice.get("finish_reason") in _FINISH, f"finish_reason is {choice.get('finish_reason')!r}")
    require(bool(reply.text()), "status 200 with empty text")


@check("api", "vllm 57136: usage of media requests")
async def usage(client: Client) -> None:
    """The usage adds up, counts a picture's tokens, and agrees with max_tokens."""
    plain = (await client.chat(asked(), max_tokens=2)).usage()
    reply = await client.chat(asked(picture()), max_tokens=2)
    seen = reply.usage()
    require(
        seen["total_tokens"] == seen["prompt_tokens"] + seen["completion_tokens"],
        f"the counts do not add up: {seen}",
    )
    require(seen["prompt_tokens"] > plain["prompt_tokens"], "a picture adds no prompt_tokens")
    require(0 < seen["completion_tokens"] <= 2, f"{seen['completion_tokens']} tokens with max_tokens 2")


@check("api", "gateways that drop an option on the way to D")
async def max_tokens(client: Client) -> None:
    """max_tokens 1 ends an answer after one token, with finish_reason 'length'."""
    reply = await client.chat(max_tokens=1)
    require(reply.usage()["completion_tokens"] == 1, f"{reply.usage()['completion_tokens']} tokens")
    require(reply.choices()[0]["finish_reason"] == "length", "finish_reason is not 'length'")


@check("api", _OPENAI)
async def stream(client: Client) -> None:
    """A stream has one id, the role first, one finish_reason, [DONE] last, and the text of the plain answer."""
    plain = await client.chat(asked(picture()))
    reply = await client.chat(asked(picture()), stream=True)
    text = reply.text()
    first = reply.events[0]
    require(len({event.get("id") for event in reply.events}) == 1, "the events have several ids")
    require(first["choices"][0]["delta"].get("role") == "assistant", "the first delta lacks a role")
    require(
        {event.get("object") for event in reply.events} == {"chat.completion.chunk"}, "an event has another object"
    )
    require(reply.choices()[0]["finish_reason"] in _FINISH, "no finish_reason")
    require(text == plain.text(), f"the stream says {text!r}, the plain answer {plain.text()!r}")


@check("api", _OPENAI)
async def stream_usage(client: Client) -> None:
    """The usage comes in a last event without choices, only if requested, and equals the plain answer's."""
    plain = (await client.chat()).usage()
    reply = await client.chat(stream=True, stream_options={"include_usage": True})
    reply.choices()
    require(reply.events[-1].get("choices") == [], "the last event has choices")
    require(reply.usage() == plain, f"{reply.usage()}, plain {plain}")
    unasked = await client.chat(stream=True)
    unasked.choices()
    require(not any(event.get("usage") for event in unasked.events), "a usage without include_usage")


@check("api", "client mistakes answered by a 500")
async def errors(client: Client) -> None:
    """An invalid request gets a 4xx with an error.message."""
    wrong = {
        "invalid JSON": b"{",
        "no messages": b'{"model": "%s"}' % client.model.encode(),
        "an unknown role": client.body().replace(b'"user"', b'"guest"'),
        "temperature -1": client.body(temperature=-1),
        "max_tokens -1": client.body(max_tokens=-1),
        "n 0": client.body(n=0),
        "a text for temperature": client.body(temperature="hot"),
    }
    for name, body in wrong.items():
        reply = await client.post(body)
        require(400 <= reply.status < 500, f"{name}: status {reply.status}")
        reply.error()


@check("api", _OPENAI)
async def headers(client: Client) -> None:
    """Answers are JSON, streams are events, and unknown paths and methods get a 404 or 405."""
    kinds = {False: "application/json", True: "text/event-stream"}
    for stream, kind in kinds.items():
        given = (await client.chat(stream=stream)).headers.get("content-type", "")
        require(given.startswith(kind), f"content-type {given!r} instead of {kind!r}")
    for name, reply in {
        "GET of a chat": await client.get("/v1/chat/completions"),
        "an unknown path": await client.post(client.body(), "/v1/chat/none"),
    }.items():
        require(reply.status in (404, 405), f"{name}: status {reply.status}")


@check("api", _OPENAI)
async def unknown_model(client: Client) -> None:
    """An unknown model gets a 404 with an error.message."""
    reply = await client.chat(model="no-such-model")
    require(reply.status == 404, f"status {reply.status}")
    reply.error()


@check("api", "vllm: an error in a stream followed by [DONE] looks like success")
async def long_prompt(client: Client) -> None:
    """A prompt beyond the model's length gets a 400 before any event, never a 200."""
    length = await client.max_model_len()
    if length > 200_000:
        raise Skipped(f"the model accepts {length} tokens")
    reply = await client.chat("word " * (length + 1), stream=True)
    require(reply.status in (400, 413), f"status {reply.status}, [DONE] came: {reply.done}")
    reply.error()


@check("api", "KV blocks leaked when a client disconnects")
async def cancellation(client: Client) -> None:
    """After a client disconnects in mid-stream the server answers as before."""
    before = await client.chat()
    body = client.body(stream=True, max_tokens=200, **await client.endless())
    reply = Reply()
    sending = asyncio.create_task(client.send(reply, body, timeout_s=20))
    while not reply.body and not sending.done():  # noqa: ASYNC110 - replies lack an event
        await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.sleep(0.2)  # until the server notices
    require((await client.chat()).text() == before.text(), "the answer differs from the one before")
