"""Instances that are drained, added and removed under requests that go on."""

import asyncio

from gateway_settings import admin_plane


async def test_a_drained_instance_finishes_what_it_has(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", admin=admin_plane(), restart="never")
    go_on = asyncio.Event()
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda _: [go_on.wait, kit.NONE, kit.WHOLE]
    running = [asyncio.create_task(gateway.answer(kit.chat())) for _ in range(4)]
    await gateway.until(lambda: len(gateway["a0"].calls) + len(gateway["a1"].calls) == 4)
    before = len(gateway["a0"].calls)

    async def order(what):
        async with gateway.session.post(f"{gateway.app.state.admin_url}/admin/instances/{what}") as response:
            return response.status, await response.json()

    status, state = await order("a0/drain")
    assert (status, state["draining"], state["in_flight"]["P"]) == (200, True, before)
    go_on.set()
    answers = await asyncio.gather(*running, *(gateway.answer(kit.chat()) for _ in range(4)))
    assert answers == [(200, kit.WHOLE)] * 8
    assert len(gateway["a0"].calls) == before > 0
    status, state = await order("a9/drain")
    assert status == 404 and "known: a0, a1" in state["error"]["message"]
    await order("a1/drain")
    assert (await gateway.error(kit.chat()))[0] == 503
    assert (await order("a0/undrain"))[1]["draining"] is False
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_instances_come_and_go_without_a_dropped_stream(start, kit):
    gateway = await start("a0:EPD", "a1:EPD")
    both = [("a0", gateway["a0"].url), ("a1", gateway["a1"].url)]
    gateway.become(both[:1])
    go_on = asyncio.Event()
    first, rest = kit.sent(kit.FIRST), kit.sent(kit.REST, kit.DONE)
    gateway["a0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, first, go_on.wait, rest]
    stream = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: bool(gateway["a0"].calls))
    gateway.become(both[1:])
    await gateway.until(lambda: gateway.table["a1"].ready)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert gateway["a1"].calls and [record.name for record in gateway.table] == ["a1"]
    go_on.set()
    assert await stream == (200, kit.FIRST + kit.REST + kit.DONE)
