"""Two instances that do not reach each other, though the gateway reaches both: neither is to blame."""

from __future__ import annotations

import asyncio

import pytest

from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed
from epd_serve.protocol import frames
from proxy.fleet import health as pairs

STREAMS = pytest.mark.parametrize("stream", [True, False])
UNREACHABLE = InstanceFailed("http://d0 does not answer", code=PEER_UNREACHABLE)


def breakers(gateway):
    return {name: gateway.app.state.health.describe(name)["breaker"] for name in gateway.fakes}


def cut_from(gateway, kit, peer, script):
    """A script of P for requests with this D; for others it answers as it should."""
    url, p0 = gateway[peer].url, gateway["p0"]
    return lambda message: script if message.decode_url == url else p0._regular(message)


@STREAMS
async def test_a_d_that_p_cannot_reach_is_left_to_others(start, kit, stream, monkeypatch):
    monkeypatch.setattr(pairs, "_AVOID_S", 0.5)
    gateway = await start("p0:P", "d0:D", "d1:D")
    refused = kit.fail(502, UNREACHABLE.message, code=PEER_UNREACHABLE)
    gateway["p0"].scripts["/stage/prefill"] = cut_from(gateway, kit, "d0", refused)
    right = (200, kit.FIRST + kit.REST + kit.DONE if stream else kit.WHOLE)
    for _ in range(8):
        assert await gateway.answer(kit.chat(stream=stream)) == right
    tried = [message for message in gateway["p0"].got("/stage/prefill") if message.decode_url == gateway["d0"].url]
    assert len(tried) <= 2, "it was told once, or once more where this machine is slow"
    assert set(breakers(gateway).values()) == {"closed"}
    del gateway["p0"].scripts["/stage/prefill"]
    await gateway.until(lambda: not gateway.table["p0"].cut_off)
    before = len(gateway["d0"].got("/stage/decode"))
    for _ in range(40):
        assert await gateway.answer(kit.chat(stream=stream)) == right
        if len(gateway["d0"].got("/stage/decode")) > before:
            break
    else:
        pytest.fail("after a while it is tried again")


@STREAMS
async def test_so_it_is_behind_the_first_token(start, kit, stream):
    """The prompt's KV cannot be written; what P says of it is no part of the answer."""
    gateway = await start("p0:P", "d0:D", "d1:D")
    event = b"data: " + UNREACHABLE.to_json() + b"\n\n"
    cut = (
        [kit.FRAMES_THEN_DECODE, kit.frame(1), frames.pack(frames.ERROR, (), event)]
        if stream
        else [kit.DECODE, UNREACHABLE.to_json()]
    )
    gateway["p0"].scripts["/stage/prefill"] = cut_from(gateway, kit, "d0", cut)
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    for _ in range(6):
        status, answer = await gateway.answer(kit.chat(stream=stream))
        assert status == 200 and b"error" not in answer
    assert len(gateway["d0"].got("/stage/decode")) == 1
    assert gateway.table["p0"].cut_off == {"d0"}
    assert set(breakers(gateway).values()) == {"closed"}


async def test_an_e_that_cannot_reach_p_gets_no_picture_for_it(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    gateway["e0"].scripts["/stage/encode"] = lambda _: kit.fail(502, "p0 is not there", code=PEER_UNREACHABLE)
    for number in range(8):
        body = kit.chat(kit.data_url(kit.picture(6 + number)))
        assert (await gateway.answer(body))[0] == 200
    assert len(gateway["e0"].got("/stage/encode")) == 1
    assert len(gateway["p0"].got("/stage/encode")) == 8
    assert set(breakers(gateway).values()) == {"closed"}


async def test_the_only_pair_is_tried_again_until_it_is_too_late(start, kit, monkeypatch):
    monkeypatch.setattr(pairs, "_AVOID_S", 0.2)
    gateway = await start("p0:P", "d0:D", failover={"wait_s": 60})
    answers = [kit.fail(502, UNREACHABLE.message, code=PEER_UNREACHABLE)] * 2
    p0 = gateway["p0"]
    p0.scripts["/stage/prefill"] = lambda message: answers.pop() if answers else p0._regular(message)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert len(p0.got("/stage/prefill")) == 3
    gateway.become([])
    late = await start("p0:P", "d0:D", failover={"wait_s": 0.5})
    late["p0"].scripts["/stage/prefill"] = lambda _: kit.fail(502, UNREACHABLE.message, code=PEER_UNREACHABLE)
    status, error = await late.error(kit.chat())
    said = f"{UNREACHABLE.message}; nothing could take over within 0.5 s"
    assert (status, error["code"], error["message"]) == (502, PEER_UNREACHABLE, said)


async def test_a_restarted_instance_is_avoided_by_nobody(start, kit, monkeypatch):
    """Its death may have looked like a link that is cut."""
    monkeypatch.setattr(pairs, "_AVOID_S", 300.0)
    gateway = await start("p0:P", "d0:D", failover={"wait_s": 60})
    answers = [kit.fail(502, UNREACHABLE.message, code=PEER_UNREACHABLE)]
    p0 = gateway["p0"]
    p0.scripts["/stage/prefill"] = lambda message: answers.pop() if answers else p0._regular(message)
    asked = asyncio.create_task(gateway.answer(kit.chat()))
    await gateway.until(lambda: gateway.table["p0"].cut_off == {"d0"})
    gateway["d0"].info["pid"] = 2
    assert await asked == (200, kit.WHOLE)
    assert not gateway.table["p0"].cut_off
