"""Keys, their limits and the queue, as clients of a running gateway meet them."""

import asyncio
import itertools
import json
import time
from statistics import median

import pytest
from gateway_settings import gateway_settings

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key, new_key
from epd_serve.errors import Overloaded
from epd_serve.protocol import instance_state
from proxy.admission.control import AdmissionControl, Shedding
from proxy.admission.keys import Authenticator, Client, KeyLimits, Unauthorized
from proxy.admission.queue import AdmissionQueue
from proxy.settings import Current

MINUTE = Current(gateway_settings(queue_timeout_s=60.0))


def key(name: str, **limits) -> tuple[dict[str, str], ApiKeyConfig]:
    secret, hashed = new_key()
    return {"authorization": f"Bearer {secret}"}, ApiKeyConfig(name=name, hash=hashed, **limits)


def test_new_keys_are_long_and_known_by_their_hash():
    secret, hashed = new_key()
    assert secret.startswith("epd-") and len(secret) >= 4 + 43
    assert hash_key(secret) == hashed and secret not in hashed
    client = Client("a")
    authenticator = Authenticator([(hashed, client), (new_key()[1], Client("b"))])
    assert authenticator.check(f"Bearer {secret}") is client
    assert authenticator.check(b"bearer  " + secret.encode()) is client
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


async def test_each_key_has_its_own_limits(start, kit):
    slow, slow_key = key("slow", requests_per_s=0.002, burst=2)
    single, single_key = key("single", max_concurrent=1)
    plain = {"authorization": "Bearer plain"}
    gateway = await start("pd0:PD", api_key="plain", api_keys=(slow_key, single_key))
    for expected in (200, 200, 429):
        assert (await gateway.answer(kit.chat(), headers=slow))[0] == expected
    async with gateway.post(kit.chat(), headers=slow) as response:
        assert response.status == 429 and 450 < int(response.headers["retry-after"]) <= 500
        assert json.loads(await response.read())["error"]["code"] == "rate_limit_exceeded"
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    first = asyncio.create_task(gateway.answer(kit.chat(), headers=single))
    await gateway.until(lambda: len(gateway["pd0"].got("/stage/prefill")) >= 3)
    status, error = await gateway.error(kit.chat(), headers=single)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    del gateway["pd0"].scripts["/stage/prefill"]
    await gateway.settle()
    assert (await gateway.answer(kit.chat(), headers=single))[0] == 200
    assert (await gateway.answer(kit.chat(), headers=plain))[0] == 200


async def test_a_key_pays_for_the_tokens_it_asks_for(start, kit):
    small, small_key = key("small", tokens_per_min=200)
    gateway = await start("pd0:PD", api_keys=(small_key,))
    assert (await gateway.answer(kit.chat(max_tokens=100), headers=small))[0] == 200
    async with gateway.post(kit.chat(max_tokens=100), headers=small) as response:
        assert response.status == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
    await gateway.until(lambda: not gateway.admission.queue.num_in_flight)


async def test_what_charges_no_tokens_waits_for_no_debt(start, kit):
    small, small_key = key("small", tokens_per_min=10)
    gateway = await start("pd0:PD", api_keys=(small_key,))
    body = kit.chat(max_tokens=100)
    assert [(await gateway.answer(body, headers=small))[0] for _ in range(2)] == [200, 429]
    assert (await gateway.answer({"prompt": "x"}, "/tokenize", headers=small))[0] == 200


@pytest.mark.parametrize(("max_tokens", "num_choices", "charge"), [(100, 2, 300), (None, 1, 116)])
def test_the_charge_counts_prompt_and_answers(max_tokens, num_choices, charge):
    secret, hashed = new_key()
    client = Client("a", KeyLimits(tokens_per_min=600))
    admission = AdmissionControl(
        Authenticator([(hashed, client)]), AdmissionQueue(9, 1), settings=MINUTE, clock=lambda: 1.0
    )
    visit = admission.enter(f"Bearer {secret}")
    visit.check(num_prompt_tokens=100, max_tokens=max_tokens, num_choices=num_choices)
    assert client.num_tokens_left(1.0) == 600 - charge
    visit.leave()
    assert client.num_tokens_left(1.0) == 600


async def test_a_key_does_not_pay_for_what_never_ran():
    secret, hashed = new_key()
    client = Client("a", KeyLimits(tokens_per_min=600))
    admission = AdmissionControl(
        Authenticator([(hashed, client)]), AdmissionQueue(1, 1), settings=MINUTE, clock=lambda: 1.0
    )
    running, waiting, refused = (admission.enter(f"Bearer {secret}") for _ in range(3))
    for visit, max_tokens in ((running, 100), (waiting, 200), (refused, 300)):
        visit.check(max_tokens=max_tokens)
    assert running.admit() is None
    assert waiting.admit() is not None
    with pytest.raises(Overloaded):
        refused.admit()
    assert client.num_tokens_left(1.0) == 300
    waiting.leave()
    refused.leave()
    assert client.num_tokens_left(1.0) == 500
    running.leave()
    assert client.num_tokens_left(1.0) == 500


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
    assert "epd_serve_queue_wait_seconds_count 3.0" in text and "epd_serve_requests_waiting 0.0" in text


async def test_a_greedy_key_keeps_no_modest_one_out_of_a_full_queue(start, kit):
    """Twenty-four senders of one key, each of which comes again at once, and one of another."""
    greedy, greedy_key = key("greedy")
    modest, modest_key = key("modest")
    gateway = await start("pd0:PD", max_in_flight=8, max_queue=4, api_keys=(greedy_key, modest_key))
    seconds = itertools.cycle([0.1, 0.25, 0.15, 0.3, 0.2])
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [next(seconds), kit.NONE, kit.WHOLE]
    refused = 0

    async def ask(headers):
        start_s = time.monotonic()
        status, _ = await gateway.answer(kit.chat(), headers=headers)
        return status, time.monotonic() - start_s

    async def flood():
        nonlocal refused
        while True:
            status, _ = await ask(greedy)
            refused += status == 429
            await asyncio.sleep(0.1)

    alone_s = [(await ask(modest))[1] for _ in range(10)]
    flooding = [asyncio.create_task(flood()) for _ in range(24)]
    await gateway.until(lambda: refused >= 30)
    answers = [await ask(modest) for _ in range(20)]
    for task in flooding:
        task.cancel()
    await asyncio.gather(*flooding, return_exceptions=True)
    assert [status for status, _ in answers] == [200] * 20
    assert median(seconds for _, seconds in answers) < 2 * median(alone_s)


async def test_a_request_that_makes_room_is_told_so_and_pays_nothing():
    greedy, modest = Client("greedy", KeyLimits(tokens_per_min=1000)), Client("modest")
    (greedy_secret, greedy_hash), (modest_secret, modest_hash) = new_key(), new_key()
    refused = []
    admission = AdmissionControl(
        Authenticator([(greedy_hash, greedy), (modest_hash, modest)]),
        AdmissionQueue(1, 2),
        settings=MINUTE,
        refused=lambda *what: refused.append(what),
        clock=lambda: 1.0,
    )
    visits = [admission.enter(f"Bearer {greedy_secret}") for _ in range(3)]
    for visit in visits:
        visit.check(max_tokens=100)
    waiting = [visit.admit() for visit in visits]
    assert greedy.num_tokens_left(1.0) == 700
    newcomer = admission.enter(f"Bearer {modest_secret}")
    assert newcomer.admit() is not None
    with pytest.raises(Overloaded, match="made room for another's"):
        await waiting[2]
    assert refused == [("overloaded", "greedy")]
    assert greedy.num_tokens_left(1.0) == 800
    assert not waiting[1].done()
    for visit in (*visits, newcomer):
        visit.leave()
    assert (admission.queue.num_in_flight, admission.queue.num_waiting) == (0, 0)


async def test_tokenizing_waits_for_its_turn_and_is_not_shed(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, max_queue=1, shed=True, slo={"ttft_ms": 1e-6})
    asked = {"prompt": "How many tokens?"}
    assert json.loads((await gateway.answer(asked, "/tokenize"))[1])["count"] == 2
    assert gateway.admission.queue.estimated_wait_s() == 0.0
    gateway.admission.shedding, shedding = None, gateway.admission.shedding
    crowd = Crowd(gateway, kit)
    first = crowd.send("first")
    await gateway.until(lambda: crowd.served == ["first"])
    gateway.admission.shedding = shedding
    waiting = asyncio.create_task(gateway.answer(asked, "/tokenize"))
    await crowd.waiting(1)
    status, error = await gateway.error({"tokens": [1]}, "/detokenize")
    assert (status, error["code"]) == (429, "overloaded")
    assert gateway.admission.queue.estimated_wait_s() is None, "what it took says nothing of how long requests run"
    first.cancel()
    assert (await waiting)[0] == 200
    await gateway.until(lambda: not gateway.admission.queue.num_in_flight)


async def test_clients_that_leave_the_queue_free_their_places(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, max_queue=2)
    crowd = Crowd(gateway, kit)
    gateway["pd0"].scripts["/stage/prefill"] = lambda message: [kit.FOREVER]
    first = crowd.send("first")
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
    for number in range(2):
        crowd.send(f"leaves {number}")
    await crowd.waiting(2)
    for task in crowd.tasks[1:]:
        task.cancel()
    await crowd.waiting(0)
    stays = crowd.send("stays")
    await crowd.waiting(1)
    gateway["pd0"].scripts["/stage/prefill"] = crowd._script
    first.cancel()
    assert (await stays)[0] == 200
    assert crowd.served == ["stays"]
    [client] = gateway.admission.authenticator.clients
    await gateway.until(lambda: not client.num_active)
    assert (gateway.admission.queue.num_in_flight, gateway.admission.queue.num_waiting) == (0, 0)
    gateway.admission.queue.check_integrity()


async def test_who_waits_too_long_is_told_to_come_back(start, kit):
    gateway = await start("pd0:PD", max_in_flight=1, queue_timeout_s=0.1)
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    first = asyncio.create_task(gateway.answer({"prompt": "first"}, "/v1/completions"))
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
    status, error = await gateway.error({"prompt": "late"}, "/v1/completions")
    assert (status, error["code"]) == (429, "queue_timeout")
    first.cancel()
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 0)


@pytest.mark.parametrize("priority", [0.5, "high", 2**40, True])
async def test_a_priority_is_a_whole_number(start, kit, priority):
    gateway = await start("pd0:PD")
    status, error = await gateway.error(kit.chat(priority=priority))
    assert (status, error["param"]) == (400, "priority")


async def test_a_key_may_be_kept_from_pushing_ahead(start, kit):
    headers, config = key("batch", highest_priority=10)
    gateway = await start("pd0:PD", api_keys=(config,))
    status, error = await gateway.error(kit.chat(priority=3), headers=headers)
    assert (status, error["param"]) == (400, "priority")
    assert (await gateway.answer(kit.chat(priority=10), headers=headers))[0] == 200


def new_admission(pending: list[float], **options) -> AdmissionControl:
    shedding = Shedding(ttft_s=1.0, pending_s=lambda num_tokens, has_media: pending[0])
    options = {"settings": MINUTE, "shedding": shedding, "clock": lambda: pending[1]} | options
    return AdmissionControl(Authenticator([]), AdmissionQueue(1, 9), **options)


async def test_what_comes_too_late_is_shed_before_and_behind_the_queue():
    pending, refused = [1.5, 0.0], []
    admission = new_admission(pending, refused=lambda reason, key: refused.append((reason, key)))
    visit = admission.enter(None)
    with pytest.raises(Overloaded, match="this deployment's limit of 1 s") as refusal:
        visit.admit()
    assert (refusal.value.code, refusal.value.retry_after_s) == ("slo_unattainable", 0.5)
    visit.leave()
    pending[0] = 0.2
    visits = [admission.enter(None) for _ in range(3)]
    waiting = [visit.admit() for visit in visits[:1]]
    admission.queue._mean_run_s = 0.1
    waiting += [visit.admit() for visit in visits[1:]]
    assert waiting[0] is None
    pending[1] = 0.9  # the queue was slower than thought: 0.9 s gone, 0.2 s to come
    visits[0].leave()
    visits[0].leave()
    for late, visit in zip(waiting[1:], visits[1:], strict=True):
        with pytest.raises(Overloaded):
            await late
        visit.leave()
    assert refused == [("slo_unattainable", "anonymous")] * 3
    assert admission.queue.num_in_flight == admission.queue.num_waiting == 0
    admission.queue.check_integrity()


async def test_a_visit_that_leaves_while_it_is_let_in_gives_its_place_back():
    admission = new_admission([0.0, 0.0])
    first, second, third = (admission.enter(None) for _ in range(3))
    assert first.admit() is None
    waits = second.admit(), third.admit()
    waits[0].cancel()  # its client is gone; its own leave() has not run yet
    first.leave()
    second.leave()
    await waits[1]
    third.leave()
    assert admission.queue.num_in_flight == 0


async def test_a_gateway_sheds_by_what_its_instances_report(start, kit):
    idle, busy = instance_state.Load(), instance_state.Load(num_waiting=90, num_waiting_tokens=9_000_000)
    gateway = await start("p0:P", "d0:D", shed=True, slo={"ttft_ms": 5000})
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    gateway["p0"].info["load"] = busy
    await gateway.until(lambda: gateway.table["p0"].prefill_s > 5)
    async with gateway.post(kit.chat()) as response:
        assert response.status == 429 and int(response.headers["retry-after"]) > 1
        assert json.loads(await response.read())["error"]["code"] == "slo_unattainable"
    gateway["p0"].info["load"] = idle
    await gateway.until(lambda: gateway.table["p0"].prefill_s < 5)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_health_and_metrics_may_ask_for_a_key(start, kit):
    gateway = await start("pd0:PD", api_key="secret", guard_health=True, guard_metrics=True)
    right = {"authorization": "Bearer secret"}
    async with gateway.session.get(f"{gateway.url}/metrics") as response:
        assert response.status == 401
    async with gateway.session.get(f"{gateway.url}/metrics", headers=right) as response:
        assert response.status == 200
    async with gateway.session.get(f"{gateway.url}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})
    async with gateway.session.get(f"{gateway.url}/health", headers=right) as response:
        assert "pd0" in (await response.json())["instances"]
