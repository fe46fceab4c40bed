"""Many streams on one connection between a gateway and an instance, and what happens to one of them or to it."""

import asyncio

from epd_serve.rpc import items

TOKENS = 12


def text(numbers):
    return b"".join(b'data: {"token":%d}\n\n' % number for number in numbers) + b"data: [DONE]\n\n"


def slowly(kit, *, first=1):
    """A script of tokens from ``first`` on, one each hundredth of a second."""
    steps = [kit.FRAMES]
    for number in range(first, TOKENS + 1):
        steps += [kit.frame(number), 0.01]
    return [*steps, kit.frame(0, end=True)]


async def test_a_connection_that_is_cut_fails_no_stream(start, kit):
    gateway = await start("pd0:PD", "pd1:PD")
    cuts = iter([[kit.FRAMES, kit.frame(1), 0.05, kit.DIE]])  # the connection, and with it all streams on it

    def script(message):
        last = len(gateway["pd0"].got("/stage/prefill")) == 12
        return next(cuts, None) if last else slowly(kit, first=len(message.generated) + 1)

    gateway["pd0"].scripts["/stage/prefill"] = script
    gateway["pd1"].scripts["/stage/prefill"] = lambda message: slowly(kit, first=len(message.generated) + 1)
    asked = [asyncio.create_task(gateway.answer(kit.chat(stream=True))) for _ in range(30)]
    assert {await one for one in asked} == {(200, text(range(1, TOKENS + 1)))}
    calls = gateway["pd0"].got("/stage/prefill") + gateway["pd1"].got("/stage/prefill")
    assert sum(bool(call.generated) for call in calls) >= 10, "the streams were cut in their middle"
    await gateway.settle()


async def test_a_client_that_does_not_read_stops_its_own_stream_alone(start, kit):
    gateway = await start("pd0:PD")
    event = b"data: " + b"x" * 20_000 + b"\n\n"
    sent = []

    def much(message):
        yield kit.FRAMES
        for number in range(1000):
            sent.append(number)
            yield items.pack(0, (number,), event)
        yield kit.frame(0, end=True)

    gateway["pd0"].scripts["/stage/prefill"] = much
    async with gateway.unread(kit.chat(stream=True)) as unread:
        await gateway.until(lambda: len(sent) > 5)
        held = 0
        while held != len(sent):
            held = len(sent)
            await asyncio.sleep(0.3)
        assert held < 600, "more of it waits in the gateway than a stream may have on its way"
        gateway["pd0"].scripts["/stage/prefill"] = lambda message: slowly(kit)
        answers = await asyncio.gather(*[gateway.answer(kit.chat(stream=True)) for _ in range(20)])
        assert set(answers) == {(200, text(range(1, TOKENS + 1)))}
        assert len(sent) == held
        got = bytearray()
        while not got.endswith(b"0\r\n\r\n"):
            got += await asyncio.get_running_loop().sock_recv(unread, 1 << 20)
    assert got.count(b"x" * 20_000) == 1000 and b"data: [DONE]\n\n" in got


async def test_a_client_that_leaves_ends_its_own_stream_alone(start, kit):
    gateway = await start("p0:P", "d0:D")
    first, forever = kit.FRAMES_THEN_DECODE, asyncio.Event()
    gateway["p0"].scripts["/stage/prefill"] = lambda message: [first, kit.frame(1)]
    end = kit.frame(3) + kit.frame(0, end=True)
    gateway["d0"].scripts["/stage/decode"] = lambda message: [kit.FRAMES, kit.frame(2), forever.wait, end]
    asked = [asyncio.create_task(gateway.answer(kit.chat(stream=True))) for _ in range(20)]
    await gateway.until(lambda: len(gateway["d0"].got("/stage/decode")) == 20)
    for one in asked[:5]:
        one.cancel()
    await gateway.until(lambda: len(gateway["d0"].cancelled) == 5)
    forever.set()
    assert {await one for one in asked[5:]} == {(200, text([1, 2, 3]))}
    await asyncio.gather(*asked[:5], return_exceptions=True)
    await gateway.settle()
    assert len(gateway["d0"].cancelled) == 5
