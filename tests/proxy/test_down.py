"""Instances that fail requests, fall silent or do not reach each other: where their requests go."""

import asyncio

import pytest

from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed
from epd_serve.rpc import items


@pytest.mark.parametrize(
    ("status", "name", "call", "after_s"),
    [
        (401, "p0", "/stage/prefill", 0.0),
        (409, "p0", "/stage/prefill", 0.0),
        (429, "d0", "/stage/decode", 0.0),
        (500, "p0", "/stage/prefill", 0.0),
        (503, "d0", "/stage/decode", 0.2),
    ],
)
async def test_a_failure_before_the_first_token_is_tried_elsewhere(start, kit, status, name, call, after_s):
    """And says nothing against the instance; D may say it before or after P's answer begins."""
    gateway = await start("p0:P", "p1:P", "d0:D", "d1:D")
    gateway[name].scripts[call] = lambda _: [after_s, *kit.fail(status, "not now")]
    for _ in range(6):
        assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert gateway[name].got(call) and gateway.table[name].state == "up"
    del gateway[name].scripts[call]
    before = len(gateway[name].got(call))
    for _ in range(6):
        assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert len(gateway[name].got(call)) > before


async def test_a_silent_instance_loses_its_requests_to_another(start, kit):
    """It answers /info and keeps its connections; only /health tells. Streams go on behind their tokens."""
    gateway = await start("a0:EPD", "a1:EPD", probe_timeout_s=1)
    begun = [kit.FRAMES, kit.frame(1), kit.FOREVER]
    gateway["a0"].scripts |= {
        "/health": lambda _: [kit.FOREVER],
        "/stage/prefill": lambda message: begun if message.output.stream else [kit.FOREVER],
    }

    def answer(message):
        if not message.output.stream:
            return gateway["a1"].regular(message)
        tokens = [kit.frame(number) for number in (1, 2)][len(message.generated) :]
        return [kit.FRAMES, *tokens, kit.frame(0, end=True)]

    gateway["a1"].scripts["/stage/prefill"] = answer
    streams = [asyncio.create_task(gateway.answer(kit.chat(stream=True))) for _ in range(4)]
    answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(4)))
    assert answers == [(200, kit.WHOLE)] * 4
    whole = kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE
    assert {await one for one in streams} == {(200, whole)}
    await gateway.until(lambda: gateway.table["a0"].state == "down")
    del gateway["a0"].scripts["/health"], gateway["a0"].scripts["/stage/prefill"]
    await gateway.until(lambda: gateway.table["a0"].state == "up")
    await gateway.settle()


@pytest.mark.parametrize("reporting", [True, False])
async def test_a_stream_continues_when_the_only_instance_returns(start, kit, reporting):
    """The same process: it was stopped, and nothing that failed before speaks against it."""
    gateway = await start("a0:EPD", probe_timeout_s=1, reporting=reporting)
    gateway["a0"].scripts["/stage/prefill"] = lambda message: (
        [kit.FRAMES, kit.frame(2), kit.frame(0, end=True)]
        if message.generated
        else [kit.FRAMES, kit.frame(1), kit.FOREVER]
    )
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: gateway["a0"].got("/stage/prefill"))
    gateway["a0"].scripts["/health"] = lambda _: [kit.FOREVER]
    gateway["a0"].hangs = True
    await gateway.until(lambda: gateway.table["a0"].state == "down")
    await gateway.until(lambda: gateway["a0"].cancelled)
    assert not asking.done()
    gateway["a0"].hangs = False
    del gateway["a0"].scripts["/health"]
    assert await asking == (200, kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE)
    assert len(gateway["a0"].got("/stage/prefill")) == 2
    await gateway.settle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("began", [True, False])
async def test_a_retry_avoids_a_d_that_p_cannot_reach(start, kit, stream, began):
    """Before P's answer, and behind its first token, where the prompt's KV cannot be read."""
    gateway = await start("p0:P", "d0:D", "d1:D")
    p0, error = gateway["p0"], InstanceFailed("p0 cannot reach d0", code=PEER_UNREACHABLE)
    cut = kit.fail(502, error.message, code=PEER_UNREACHABLE)
    if began:
        event = items.pack(items.ERROR, (), b"data: " + error.to_json() + b"\n\n")
        cut = [kit.FRAMES_THEN_DECODE, kit.frame(1), event] if stream else [kit.DECODE, error.to_json()]
    p0.scripts["/stage/prefill"] = lambda message: (
        cut if message.decode_url == gateway["d0"].url else p0.regular(message)
    )
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    for number in range(1, 7):
        status, answer = await gateway.answer(kit.chat(stream=stream))
        assert status == 200 and b"error" not in answer
        assert len(gateway["d1"].got("/stage/decode")) == number
    assert 6 < len(p0.got("/stage/prefill")) <= 12, "once at each of them"
    assert gateway.table["d0"].state == "up", "another P may reach it"


async def test_an_e_that_cannot_reach_p_gets_the_picture_no_more(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    gateway["e0"].scripts["/stage/encode"] = lambda _: kit.fail(502, "p0 is not there", code=PEER_UNREACHABLE)
    assert (await gateway.answer(kit.chat(kit.data_url(kit.picture()))))[0] == 200
    assert len(gateway["e0"].got("/stage/encode")) == len(gateway["p0"].got("/stage/encode")) == 1
