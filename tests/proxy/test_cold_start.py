"""A deployment that is still loading: requests wait instead of failing; one that does not come up is a 503."""

import asyncio


async def test_a_request_before_the_instances_are_ready_is_queued(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", loading=True)
    early = asyncio.create_task(gateway.answer(kit.chat()))
    models = asyncio.create_task(gateway.session.get(f"{gateway.url}/v1/models"))
    await asyncio.sleep(0.3)
    assert not early.done()
    assert not models.done()
    async with gateway.session.get(f"{gateway.url}/health") as response:
        assert response.status == 503
    for fake in gateway.fakes.values():
        fake.loading = False
    assert await early == (200, kit.WHOLE)
    async with await models as response:
        assert (await response.json())["data"][0]["id"] == "demo"


async def test_only_for_as_long_as_a_start_may_take(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", loading=True, startup_wait_s=0.2)
    status, error = await gateway.error(kit.chat())
    assert status == 503
    assert "try again" in error["message"]


async def test_an_instance_lost_later_is_a_503_at_once(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    gateway["d0"].loading = True
    await gateway.until(lambda: not gateway.table["d0"].ready)
    status, error = await gateway.error(kit.chat())
    assert status == 503
    assert "decode" in error["message"]
