"""A deployment that is still loading: requests wait instead of failing; one that does not come up is a 503."""

import asyncio


async def statuses(gateway, *paths):
    found = []
    for path in paths:
        async with gateway.session.get(gateway.url + path) as response:
            found.append(response.status)
    return found


async def waiting(gateway, *request):
    """Send a request; return its task once the gateway has read it."""
    [client] = gateway.admission.authenticator.holders
    asked = asyncio.create_task(gateway.answer(*request))
    await gateway.until(lambda: client.num_active == 1 or asked.done())
    assert not asked.done()
    return asked


async def test_requests_before_the_instances_are_ready_wait(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", loading=True)
    early = await waiting(gateway, kit.chat())
    models = asyncio.create_task(gateway.session.get(f"{gateway.url}/v1/models"))
    assert await statuses(gateway, "/health") == [503]
    for fake in gateway.fakes.values():
        fake.loading = False
    assert await early == (200, kit.WHOLE)
    async with await models as response:
        assert (await response.json())["data"][0]["id"] == "demo"


async def test_only_for_as_long_as_a_start_may_take(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", loading=True, startup_wait_s=0.2)
    assert (await gateway.error(kit.chat()))[0] == 503


async def test_an_instance_lost_later_is_waited_for(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    await gateway.until(lambda: gateway.fleet.complete_at_s)
    gateway["d0"].loading = True
    await gateway.until(lambda: not gateway.table["d0"].ready)
    asked = await waiting(gateway, kit.chat())
    assert await statuses(gateway, "/health", "/health/ready", "/health/ready?role=D") == [503, 200, 503]
    gateway["d0"].loading = False
    assert await asked == (200, kit.WHOLE)


async def test_none_is_waited_for_that_is_not_started_again(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", restart="never")
    await gateway.until(lambda: gateway.fleet.complete_at_s)
    gateway["d0"].loading = True
    await gateway.until(lambda: not gateway.table["d0"].ready)
    assert (await gateway.error(kit.chat()))[0] == 503
    assert await statuses(gateway, "/health/ready", "/health/live") == [503, 200]


async def test_instances_that_all_leave_are_waited_for_with_their_model(start, kit):
    """As a joined P whose host is gone: nothing in the table says that there was one."""
    gateway = await start("p0:P", "d0:D", "spare:P")
    await gateway.until(lambda: gateway.fleet.complete_at_s)
    url = gateway["spare"].url
    gateway.become([("d0", gateway["d0"].url)])
    asked = await waiting(gateway, kit.chat())
    gateway.become([("d0", gateway["d0"].url), ("p9", url)])
    assert await asked == (200, kit.WHOLE)
