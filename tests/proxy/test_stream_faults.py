"""Many streams on one connection between a gateway and an instance, one of which is not read."""

import asyncio

from epd_serve.rpc import items

TOKENS = 12


def text(numbers):
    return b"".join(b'data: {"token":%d}\n\n' % number for number in numbers) + b"data: [DONE]\n\n"


def slowly(kit):
    """A script of tokens, one each hundredth of a second."""
    steps = [kit.FRAMES]
    for number in range(1, TOKENS + 1):
        steps += [kit.frame(number), 0.01]
    return [*steps, kit.frame(0, end=True)]


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
