"""Keys, their limits and the queue, as clients of a running gateway meet them."""

import asyncio
import json

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import new_key


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def key(name, **limits):
    secret, hashed = new_key()
    return bearer(secret), ApiKeyConfig(name=name, hash=hashed, **limits)


async def test_only_who_shows_a_key_is_answered(start, kit):
    right, hashed = key("a")
    secret = right["authorization"].removeprefix("Bearer ")
    gateway = await start("pd0:PD", api_key="plain", api_keys=(hashed, key("b")[1]))
    for headers in (right, {"authorization": f"bearer  {secret}"}, {"x-api-key": secret}, bearer("plain")):
        assert await gateway.answer(kit.chat(), headers=headers) == (200, kit.WHOLE)
    wrong = [secret, f"Basic {secret}", f"Bearer {secret[:-1]}", "Bearer " + "x" * 9999, "Bearer é"]
    for headers in ({}, {"x-api-key": "wrong"}, *({"authorization": value} for value in wrong)):
        status, error = await gateway.error(kit.chat(), headers=headers)
        assert (status, error["code"]) == (401, "invalid_api_key") and secret[:-1] not in error["message"]
    assert len(gateway["pd0"].got("/stage/prefill")) == 4
    for path, expected in (("/v1/models", 401), ("/health", 200)):
        async with gateway.session.get(gateway.url + path) as response:
            assert response.status == expected


async def test_each_key_has_its_own_limit_of_choices(start, kit):
    two, hashed = key("two", max_concurrent=2)
    gateway = await start("pd0:PD", api_key="plain", api_keys=(hashed,))
    status, error = await gateway.error(kit.chat(n=3), headers=two)
    assert (status, error["param"]) == (400, "n")
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    first = asyncio.create_task(gateway.answer(kit.chat(n=2), headers=two))
    await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
    status, error = await gateway.error(kit.chat(), headers=two)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    del gateway["pd0"].scripts["/stage/prefill"]
    await gateway.settle()
    for headers in (two, bearer("plain")):
        assert (await gateway.answer(kit.chat(), headers=headers))[0] == 200


async def test_the_queue_goes_by_priority_and_is_bounded(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, max_queue=3)
    queue, go_on, asked = gateway.admission.queue, asyncio.Event(), []
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [go_on.wait, kit.NONE, kit.WHOLE]
    for number, (prompt, priority) in enumerate([("first", 0), ("later", 5), ("usual", 0), ("urgent", -1)]):
        body = {"prompt": prompt, "priority": priority}
        asked.append(asyncio.create_task(gateway.answer(body, "/v1/completions")))
        await gateway.until(lambda number=number: (queue.num_in_flight, queue.num_waiting) == (1, number))
    async with gateway.post({"prompt": "too many"}, "/v1/completions") as response:
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert json.loads(await response.read())["error"]["code"] == "overloaded"
    go_on.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    calls = gateway["pd0"].got("/stage/prefill")
    assert [call.prompt for call in calls] == ["first", "urgent", "usual", "later"]
    await gateway.until(lambda: not queue.num_in_flight)
    text = await gateway.text("/metrics")
    for line in (
        'epd_serve_refused_total{key="anonymous",reason="overloaded"} 1.0',
        "epd_serve_request_queue_time_seconds_count 3.0",
        "epd_serve_num_requests_waiting 0.0",
    ):
        assert line in text


async def test_a_long_wait_ends_with_retry_after(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, queue_timeout_s=0.1)
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    first = asyncio.create_task(gateway.answer({"prompt": "first"}, "/v1/completions"))
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
    status, error = await gateway.error({"prompt": "late"}, "/v1/completions")
    assert (status, error["code"]) == (429, "queue_timeout")
    first.cancel()
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 0)


async def test_nothing_is_fetched_for_a_request_that_finds_the_queue_full(start, kit):
    gateway = await start("epd0:EPD", max_in_flight=1, max_queue=0)
    gateway["epd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    running = asyncio.create_task(gateway.answer(kit.chat()))
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
    status, error = await gateway.error(kit.chat("http://127.0.0.1:1/picture.png"))
    assert (status, error["code"]) == (429, "overloaded")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
