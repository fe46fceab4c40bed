"""Keys, their limits and the queue, as clients of a running gateway meet them."""

import asyncio
import json

import pytest

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key, new_key
from proxy.admission import Authenticator, Holder, Unauthorized


def key(name: str, **limits) -> tuple[dict[str, str], ApiKeyConfig]:
    secret, hashed = new_key()
    return {"authorization": f"Bearer {secret}"}, ApiKeyConfig(name=name, hash=hashed, **limits)


def test_new_keys_are_long_and_known_by_their_hash():
    secret, hashed = new_key()
    assert secret.startswith("epd-") and len(secret) >= 4 + 43
    assert hash_key(secret) == hashed and secret not in hashed
    client = Holder("a")
    authenticator = Authenticator([(hashed, client), (new_key()[1], Holder("b"))])
    assert authenticator.check(f"Bearer {secret}") is client
    assert authenticator.check(b"bearer  " + secret.encode()) is client
    assert authenticator.check(None, secret) is client  # Anthropic's x-api-key
    with pytest.raises(Unauthorized):
        authenticator.check(None, "wrong")
    for wrong in (
        None,
        "",
        secret,
        f"Basic {secret}",
        f"Bearer {secret[:-1]}",
        "Bearer " + "x" * 9999,
        "Bearer é",
    ):
        with pytest.raises(Unauthorized) as refusal:
            authenticator.check(wrong)
        assert secret[:-1] not in refusal.value.message


async def test_each_key_has_its_own_limit(start, kit):
    single, single_key = key("single", max_concurrent=1)
    plain = {"authorization": "Bearer plain"}
    gateway = await start("pd0:PD", api_key="plain", api_keys=(single_key,))
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    first = asyncio.create_task(gateway.answer(kit.chat(), headers=single))
    await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
    status, error = await gateway.error(kit.chat(), headers=single)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    del gateway["pd0"].scripts["/stage/prefill"]
    await gateway.settle()
    assert (await gateway.answer(kit.chat(), headers=single))[0] == 200
    assert (await gateway.answer(kit.chat(), headers=plain))[0] == 200


class Crowd:
    """Requests of which the one called "first" holds its place until its client leaves."""

    def __init__(self, gateway, kit):
        self.gateway, self.kit = gateway, kit
        self.served = []
        self.tasks = []
        gateway["pd0"].scripts["/stage/prefill"] = self._script

    def _script(self, message):
        self.served.append(message.prompt)
        if message.prompt == "first":
            return [self.kit.FOREVER]
        return [0.01, self.kit.NONE, b'{"object":"text_completion"}']

    def send(self, prompt, **fields):
        body = {"prompt": prompt, **fields}
        self.tasks.append(asyncio.create_task(self.gateway.answer(body, "/v1/completions")))
        return self.tasks[-1]

    async def waiting(self, number):
        await self.gateway.until(lambda: self.gateway.admission.queue.num_waiting == number)


async def test_the_queue_goes_by_priority_and_is_bounded(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, max_queue=3)
    crowd = Crowd(gateway, kit)
    first = crowd.send("first")
    await gateway.until(lambda: crowd.served == ["first"])
    for number, (prompt, priority) in enumerate([("later", 5), ("usual", 0), ("urgent", -1)], start=1):
        crowd.send(prompt, priority=priority)
        await crowd.waiting(number)
    async with gateway.post({"prompt": "too many"}, "/v1/completions") as response:
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert json.loads(await response.read())["error"]["code"] == "overloaded"
    first.cancel()
    assert {status for status, _ in await asyncio.gather(*crowd.tasks[1:])} == {200}
    assert crowd.served == ["first", "urgent", "usual", "later"]
    await gateway.until(lambda: not gateway.admission.queue.num_in_flight)
    assert (gateway.admission.queue.num_in_flight, gateway.admission.queue.num_waiting) == (0, 0)
    async with gateway.session.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    assert 'epd_serve_refused_total{key="anonymous",reason="overloaded"} 1.0' in text
    assert (
        "epd_serve_request_queue_time_seconds_count 3.0" in text and "epd_serve_num_requests_waiting 0.0" in text
    )


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
