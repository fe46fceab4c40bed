"""Instances that fail requests, fall silent or do not reach each other: where their requests go."""

from __future__ import annotations

import asyncio
import time

import pytest

from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed
from epd_serve.rpc import items

STREAMS = pytest.mark.parametrize("stream", [True, False])
UNREACHABLE = InstanceFailed("p0 cannot reach d0", code=PEER_UNREACHABLE)


@pytest.mark.parametrize(("status", "reason"), [(500, "out of memory"), (401, "this instance asks for a key")])
async def test_an_error_before_the_first_token_goes_to_every_other_instance(start, kit, status, reason):
    gateway = await start("a0:EPD", "a1:EPD", "a2:EPD", "a3:EPD")
    for name in ("a0", "a1", "a2"):
        gateway[name].scripts["/stage/prefill"] = lambda _: kit.fail(status, reason)
    for _ in range(4):
        assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    await gateway.settle()


@pytest.mark.parametrize("status", [409, 429, 503])
@pytest.mark.parametrize(
    ("name", "call", "after_s"),
    [("p0", "/stage/prefill", 0.0), ("d0", "/stage/decode", 0.0), ("d0", "/stage/decode", 0.2)],
)
async def test_a_refusal_for_the_instances_own_state_is_tried_elsewhere(start, kit, status, name, call, after_s):
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


# ------------------------------------------------------------------ silence


async def test_a_silent_instance_loses_its_requests_to_another(start, kit):
    """It answers /info and keeps its connections; only /health tells."""
    gateway = await start("a0:EPD", "a1:EPD", probe_timeout_s=0.3)
    gateway["a0"].scripts |= {"/health": lambda _: [kit.FOREVER], "/stage/prefill": lambda _: [kit.FOREVER]}
    started = time.monotonic()
    answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(4)))
    assert answers == [(200, kit.WHOLE)] * 4
    assert time.monotonic() - started < 30, "not the request's own time limit"
    await gateway.until(lambda: gateway.table["a0"].state == "down")
    del gateway["a0"].scripts["/health"], gateway["a0"].scripts["/stage/prefill"]
    await gateway.until(lambda: gateway.table["a0"].state == "up")
    await gateway.settle()


async def test_a_stream_leaves_a_stopped_instance(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", probe_timeout_s=0.3)
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda message: (
            [kit.FRAMES, kit.frame(2), kit.frame(0, end=True)]
            if message.generated
            else [kit.FRAMES, kit.frame(1), kit.FOREVER]
        )
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: any(gateway[name].got("/stage/prefill") for name in ("a0", "a1")))
    [stopped] = [name for name in ("a0", "a1") if gateway[name].got("/stage/prefill")]
    gateway[stopped].scripts["/health"] = lambda _: [kit.FOREVER]
    assert await asking == (200, kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE)
    await gateway.settle()


@pytest.mark.parametrize("reporting", [True, False])
async def test_a_stream_continues_when_the_only_instance_returns(start, kit, reporting):
    """The same process: it was stopped, and nothing that failed before speaks against it."""
    gateway = await start("a0:EPD", probe_timeout_s=0.3, reporting=reporting)
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


# ------------------------------------------------------------------ P and D that do not reach each other


def cut_from(gateway, peer, script):
    """P's answers: ``script`` where D is ``peer``, else it answers as it should."""
    url, p0 = gateway[peer].url, gateway["p0"]
    return lambda message: script if message.decode_url == url else p0.regular(message)


@STREAMS
async def test_a_retry_avoids_a_d_that_p_cannot_reach(start, kit, stream):
    gateway = await start("p0:P", "d0:D", "d1:D")
    refused = kit.fail(502, UNREACHABLE.message, code=PEER_UNREACHABLE)
    gateway["p0"].scripts["/stage/prefill"] = cut_from(gateway, "d0", refused)
    right = (200, kit.FIRST + kit.REST + kit.DONE if stream else kit.WHOLE)
    for number in range(1, 9):
        assert await gateway.answer(kit.chat(stream=stream)) == right
        assert len(gateway["d1"].got("/stage/decode")) == number
    assert len(gateway["p0"].got("/stage/prefill")) <= 16, "once at each of them"
    assert gateway.table["d0"].state == "up", "another P may reach it"


@STREAMS
async def test_a_retry_avoids_it_behind_the_first_token_too(start, kit, stream):
    """The prompt's KV cannot be written; P's error is no part of the answer."""
    gateway = await start("p0:P", "d0:D", "d1:D")
    event = b"data: " + UNREACHABLE.to_json() + b"\n\n"
    cut = (
        [kit.FRAMES_THEN_DECODE, kit.frame(1), items.pack(items.ERROR, (), event)]
        if stream
        else [kit.DECODE, UNREACHABLE.to_json()]
    )
    gateway["p0"].scripts["/stage/prefill"] = cut_from(gateway, "d0", cut)
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    for _ in range(6):
        status, answer = await gateway.answer(kit.chat(stream=stream))
        assert status == 200 and b"error" not in answer
    assert gateway["d0"].got("/stage/decode")


async def test_an_e_that_cannot_reach_p_gets_the_picture_no_more(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    gateway["e0"].scripts["/stage/encode"] = lambda _: kit.fail(502, "p0 is not there", code=PEER_UNREACHABLE)
    assert (await gateway.answer(kit.chat(kit.data_url(kit.picture()))))[0] == 200
    assert len(gateway["e0"].got("/stage/encode")) == len(gateway["p0"].got("/stage/encode")) == 1
