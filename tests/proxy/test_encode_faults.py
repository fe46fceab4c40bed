"""Encoders that fail, stall or are too busy: who encodes then."""

from functools import partial

import pytest

from epd_serve.protocol.wire import EncodeReply, encode

ENCODED = (200, {}), encode(EncodeReply(cached=False))


def red(kit):
    return kit.data_url(kit.picture())


def encoded_by(gateway, *names, times=1):
    """A step of a script: until these instances have been asked to encode, so many times together."""
    return partial(gateway.until, lambda: sum(len(gateway[name].got("/stage/encode")) for name in names) == times)


async def test_at_last_p_encodes_itself(start, kit):
    gateway = await start("e0:E", "e1:E", "p0:P", "d0:D")
    gateway["e0"].scripts["/stage/encode"] = lambda _: kit.fail(500, "out of memory")
    gateway["e1"].scripts["/stage/encode"] = lambda _: [kit.DIE]
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [encoded_by(gateway, "p0"), kit.DECODE]
    assert await gateway.answer(kit.chat(red(kit))) == (200, kit.WHOLE)
    [encode] = gateway["p0"].got("/stage/encode")
    assert encode.announce_to == gateway["p0"].url
    assert "epd_serve_encode_retries_total 2.0" in await gateway.text("/metrics")


@pytest.mark.parametrize("both", [True, False])
async def test_encoders_that_are_too_busy_are_not_relieved_by_p(start, kit, both):
    """Another encoder may take the image; P does not load the tower for it, and the client comes back later."""
    gateway = await start("e0:E", "e1:E", "p0:P", "d0:D")
    for name in ("e0", "e1")[: 1 + both]:
        gateway[name].scripts["/stage/encode"] = lambda _: kit.fail(503, "busy", code="preparation_full")
    script = [kit.FOREVER] if both else [encoded_by(gateway, "e1"), kit.DECODE]
    gateway["p0"].scripts["/stage/prefill"] = lambda _: script
    async with gateway.post(kit.chat(red(kit))) as response:
        assert response.status == (503 if both else 200)
        assert not both or int(response.headers["retry-after"]) > 0
    assert gateway["p0"].got("/stage/encode") == []
    await gateway.settle()


async def test_an_image_that_no_instance_can_encode_is_an_error(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    await gateway.answer(kit.chat())  # what follows is sent at once, not when there is a connection
    for name in ("e0", "p0"):
        gateway[name].scripts["/stage/encode"] = lambda _: kit.fail(500, "it cannot encode this")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    assert (await gateway.error(kit.chat(red(kit), stream=True)))[0] == 502
    assert gateway["p0"].got("/stage/encode")
    await gateway.until(lambda: len(gateway["p0"].cancelled) == len(gateway["d0"].cancelled) == 1)
    await gateway.settle()


async def test_an_image_that_the_encoder_refuses_is_the_clients_error(start, kit):
    gateway = await start("e0:E", "e1:E", "p0:P", "d0:D")
    await gateway.answer(kit.chat())
    for name in ("e0", "e1"):
        gateway[name].scripts["/stage/encode"] = lambda _: kit.fail(400, "the image is broken: truncated")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    status, error = await gateway.error(kit.chat(red(kit)))
    assert (status, error["message"]) == (400, "the image is broken: truncated")
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert len(gateway["e0"].calls) + len(gateway["e1"].calls) == 1
    await gateway.until(lambda: len(gateway["p0"].cancelled) == 1)
    await gateway.settle()


async def test_an_encoder_may_take_any_time(start, kit):
    """Only one that does not answer its probes is given up."""
    gateway = await start("e0:E", "e1:E", "p0:P", "d0:D", instances={"peer_timeout_s": 0.1})
    for name in ("e0", "e1"):
        gateway[name].scripts["/stage/encode"] = lambda _: [1.0, *ENCODED]
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [encoded_by(gateway, "e0", "e1"), 1.2, kit.DECODE]
    assert await gateway.answer(kit.chat(red(kit))) == (200, kit.WHOLE)
    assert len(gateway["e0"].got("/stage/encode")) + len(gateway["e1"].got("/stage/encode")) == 1
