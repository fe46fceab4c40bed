"""Requests whose media come slowly hold up nobody but their own API key."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import new_key
from epd_serve.errors import Overloaded
from proxy.media.fetch import FetchPlaces


def key(name, **limits):
    secret, hashed = new_key()
    return {"authorization": f"Bearer {secret}"}, ApiKeyConfig(name=name, hash=hashed, **limits)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_asker_has_as_many_places_as_are_free():
    places = FetchPlaces(8)
    greedy = [asyncio.create_task(places.take("greedy", 60)) for _ in range(20)]
    await settled()
    assert sum(task.done() for task in greedy) == 4
    modest = [await places.take("modest", 60) for _ in range(2)]
    assert places.num_taken == 6
    modest.append(await places.take("third", 60))
    for place in modest:
        place.give_back()
        place.give_back()
    await settled()
    assert sum(task.done() for task in greedy) == 4 == places.num_taken, "no more than are free for others"
    greedy[0].result().give_back()
    await settled()
    assert [task.done() for task in greedy[:6]] == [True] * 5 + [False]
    for task in greedy:
        task.cancel()
    for result in await asyncio.gather(*greedy, return_exceptions=True):
        if not isinstance(result, BaseException):
            result.give_back()
    places_taken = [await places.take("greedy", 60) for _ in range(4)]
    assert places.num_taken == len(places_taken), "who left has left nothing behind"


async def test_askers_that_wait_take_turns():
    places = FetchPlaces(2)
    held = await places.take("first", 60)
    order = []

    async def ask(asker):
        place = await places.take(asker, 60)
        order.append(asker)
        await settled()
        place.give_back()

    held_too = await places.take("second", 60)
    tasks = [asyncio.create_task(ask(asker)) for asker in ("a", "a", "a", "b", "c")]
    await settled()
    assert not order
    held.give_back()
    held_too.give_back()
    await asyncio.gather(*tasks)
    assert sorted(order[:3]) == ["a", "b", "c"] and places.num_taken == 0


async def test_a_wait_for_a_place_has_an_end():
    places = FetchPlaces(2)
    held = await places.take("a", 60)
    with pytest.raises(Overloaded, match="still being fetched") as refusal:
        await places.take("a", 0.01)
    assert refusal.value.code == "queue_timeout"
    held.give_back()
    (await places.take("a", 60)).give_back()
    assert places.num_taken == 0


@contextlib.asynccontextmanager
async def trickling_site(picture):
    """``/slow`` sends a byte now and then, ``/fast`` a picture."""
    asked = 0

    async def slow(request):
        nonlocal asked
        asked += 1
        response = web.StreamResponse(headers={"content-length": "100000"})
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.1)

    async def fast(request):
        return web.Response(body=picture)

    app = web.Application()
    app.router.add_get("/slow", slow)
    app.router.add_get("/fast", fast)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield url, lambda: asked
    finally:
        await runner.cleanup()


async def test_media_that_trickle_hold_no_places_that_run(start, kit):
    slow, slow_key = key("slow")
    quick, quick_key = key("quick", tokens_per_min=10_000)
    async with trickling_site(kit.picture()) as (url, asked):
        gateway = await start(
            "epd0:EPD",
            max_in_flight=4,
            max_queue=4,
            api_keys=(slow_key, quick_key),
            media={"allow_private": True, "fetch_timeout_s": 600.0},
        )
        body = kit.chat(f"{url}/slow")
        trickling = [asyncio.create_task(gateway.answer(body, headers=slow)) for _ in range(40)]
        tokenizing = {"model": "demo", "messages": body["messages"]}
        trickling += [asyncio.create_task(gateway.answer(tokenizing, "/tokenize", headers=slow)) for _ in range(8)]
        await gateway.until(lambda: asked() >= 16)  # connections to one host
        for image in ((), (kit.data_url(kit.picture()),), (f"{url}/fast",)):
            status, answer = await asyncio.wait_for(gateway.answer(kit.chat(*image), headers=quick), 120)
            assert status == 200, answer
        assert gateway.admission.queue.num_in_flight == 0 and not any(task.done() for task in trickling)
        for task in trickling:
            task.cancel()
        await asyncio.gather(*trickling, return_exceptions=True)
        clients = gateway.admission.authenticator.clients
        await gateway.until(lambda: not any(client.num_active for client in clients))
        gateway.admission.queue.check_integrity()


async def test_nothing_is_fetched_for_a_request_that_is_refused_anyway(start, kit):
    poor, poor_key = key("poor", tokens_per_min=100)
    other, other_key = key("other")
    async with trickling_site(kit.picture()) as (url, asked):
        gateway = await start(
            "epd0:EPD", max_in_flight=1, max_queue=0, api_keys=(poor_key, other_key), media={"allow_private": True}
        )
        assert (await gateway.answer(kit.chat(max_tokens=200), headers=poor))[0] == 200
        status, error = await gateway.error(kit.chat(f"{url}/slow"), headers=poor)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        gateway["epd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
        running = asyncio.create_task(gateway.answer(kit.chat(), headers=other))
        async with asyncio.timeout(60):
            await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
        status, error = await gateway.error(kit.chat(f"{url}/slow"), headers=other)
        assert (status, error["code"]) == (429, "overloaded")
        assert asked() == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_request_whose_media_cannot_be_had_pays_nothing(start, kit):
    payer, payer_key = key("payer", tokens_per_min=1000)
    gateway = await start("epd0:EPD", api_keys=(payer_key,))
    status, error = await gateway.error(kit.chat("data:image/png;base64,AAAA", max_tokens=900), headers=payer)
    assert status == 400 and "image" in error["message"]
    status, answer = await gateway.answer(kit.chat(max_tokens=900), headers=payer)
    assert status == 200, json.loads(answer)
