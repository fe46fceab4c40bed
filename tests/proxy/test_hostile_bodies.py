"""No body up to the limit costs the event loop, or the machine, more than a little."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time

import pytest
from hostile_bodies import HOSTILE

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.generation import ChatCompletionRequest, CompletionRequest
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.openai.responses import ResponsesRequest
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, TokenizeBody
from proxy.api import payloads
from proxy.media.loader import decode_data_url

PARSERS = {
    "/v1/chat/completions": ChatCompletionRequest.parse,
    "/v1/completions": CompletionRequest.parse,
    "/v1/responses": ResponsesRequest.parse,
    "/tokenize": TokenizeBody.parse,
    "/detokenize": DetokenizeBody.parse,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_costs_the_loop_next_to_nothing(name):
    used = [
        await _seconds_to_refuse(*HOSTILE[name]) for _ in range(3)
    ]  # whoever else computes makes single ones slow
    assert min(on_loop_s for on_loop_s, _ in used) < 0.05
    assert min(in_all_s for _, in_all_s in used) < 0.5


async def _seconds_to_refuse(path, status, text):
    """CPU seconds of the event loop, and of the process."""
    parse = payloads.parsed_body if path.startswith("/v1/") else payloads.parsed
    body = bytearray(text().encode())
    on_loop_s, in_all_s = time.thread_time(), time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        parsed = await parse(PARSERS[path], body, "")
        await parsed.load(_no_picture)
    used = time.thread_time() - on_loop_s, time.process_time() - in_all_s
    assert refused.value.status == status
    assert len(refused.value.message) < 1000
    return used


async def _no_picture(sources):
    raise InvalidRequest("it is no picture")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hi"}] * 2048},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4096}]},
        {"messages": [{"role": "user", "content": "a, {b}\n" * 700_000}]},
        {"messages": [{"role": "user", "content": "é" * 4_000_000}]},
    ],
    ids=["messages", "parts", "text", "letters"],
)
async def test_what_is_within_the_limits_is_read_beside_the_loop(body):
    text, on_loop_s = json.dumps(body, ensure_ascii=False).encode(), []
    for _ in range(3):  # whoever else computes makes single ones slow
        begun_s = time.thread_time()
        parsed = await payloads.parsed_body(ChatCompletionRequest.parse, bytearray(text), "")
        on_loop_s.append(time.thread_time() - begun_s)
    assert min(on_loop_s) < 0.05
    assert len(parsed.request.messages) == len(body["messages"])


async def test_a_large_body_waits_for_one_of_each_other_key():
    begun, begin, order, text = threading.Event(), threading.Event(), [], bytearray(b"[" * 1000)

    def parse(name):
        def parse(_):
            begun.set()
            begin.wait(60)
            order.append(name)
            if name == "broken":
                raise InvalidRequest(name)

        return parse

    greedy = [asyncio.create_task(payloads.parsed(parse(f"greedy {n}"), text, "greedy")) for n in range(5)]
    await asyncio.to_thread(begun.wait, 60)
    others = [asyncio.create_task(payloads.parsed(parse(name), text, name)) for name in ("broken", "modest")]
    await asyncio.sleep(0)
    greedy[2].cancel()
    await asyncio.sleep(0)
    begin.set()
    results = await asyncio.gather(*greedy, *others, return_exceptions=True)
    assert order == ["greedy 0", "greedy 1", "broken", "modest", "greedy 3", "greedy 4"]
    assert [type(result).__name__ for result in results[2:6:3]] == ["CancelledError", "InvalidRequest"]


async def test_slashes_may_be_escaped_in_a_picture():
    """PHP writes them so. The picture goes the short way, at its own length."""
    plain = json.dumps(_chat("data:image/png;base64," + "AB/+" * 1000))
    for text in (plain, plain.replace("/", "\\/")):
        parsed = payloads.ParsedBody(ChatCompletionRequest.parse, bytearray(text.encode()))
        [source] = parsed._sources
        assert source.payload == b"AB/+" * 1000
        assert parsed.text_bytes < 200


@pytest.mark.parametrize("limit", [payloads.MAX_TEXT_BYTES, 1000])
async def test_slashes_that_are_escaped_late_in_a_picture(monkeypatch, limit):
    """A body that can be parsed as it is is, if need be; of one that is too long for that all is searched."""
    monkeypatch.setattr(payloads, "MAX_TEXT_BYTES", limit)
    plain = "A" * 8000 + "AB/+" * 1000
    text = json.dumps(_chat("data:image/png;base64," + plain)).replace(plain, plain.replace("/", "\\/"))
    parsed = payloads.ParsedBody(ChatCompletionRequest.parse, bytearray(text.encode()))

    async def load(sources: list[MediaSource]) -> list[bytes]:
        [source] = sources
        header, _, text = source.url.partition(",")
        return [decode_data_url(f"{header},", text if source.payload is None else source.payload, 1 << 20)[1]]

    assert await parsed.load(load) == [base64.b64decode(plain)]


def _chat(url: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
