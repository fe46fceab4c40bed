"""A gateway of several processes: one to its clients, to Prometheus and to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.config.keys import hash_key
from epd_serve.launch.processes.ports import free_port

NUM_STREAMS = 16
_ADMIN = {"authorization": "Bearer secret"}


class Crew:
    """A running gateway; every request of ``session`` comes on a connection of its own."""

    def __init__(self, file: Path, settings: dict[str, Any], session: aiohttp.ClientSession) -> None:
        self.file = file
        self.settings = settings
        self.session = session
        self.url = f"http://127.0.0.1:{settings['port']}"
        self.admin = f"http://127.0.0.1:{settings['admin']['port']}"
        self.hang_timeout_s: float | None = None
        self.num_begun = 0
        self.process: asyncio.subprocess.Process

    def write(self, **changes: Any) -> None:
        self.settings |= changes
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"gateway": self.settings, "hang_timeout_s": self.hang_timeout_s}))
        new.replace(self.file)

    async def workers(self) -> dict[int, dict[str, int]]:
        return {one["worker"]: one for one in (await self.get("/workers"))["workers"]}

    async def all_workers(self) -> dict[int, dict[str, int]] | None:
        """None where one of them is away."""
        workers = await self.workers()
        return workers if len(workers) == 2 else None

    async def get(self, path: str) -> Any:
        async with self.session.get(self.admin + path, headers=_ADMIN) as response:
            return await response.json()

    async def order(self, path: str, **body: Any) -> int:
        async with self.session.post(self.admin + path, json=body, headers=_ADMIN) as response:
            return response.status

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until it gives something true, and errors of a worker that is away are over."""
        async with asyncio.timeout(500):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if found := await condition():
                        return found
                await asyncio.sleep(0.05)

    def post(self, body: Any, key: str = "", path: str = "/v1/chat/completions") -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.session.post(self.url + path, json=body, headers=headers)

    async def status(self, body: Any, key: str = "", path: str = "/v1/chat/completions") -> int:
        async with self.post(body, key, path) as response:
            await response.read()
            return response.status

    async def stream(self, body: Any, key: str = "") -> bytes:
        """All that comes of it, however it ends; ``num_begun`` counts those of which there is an event."""
        data, has_begun = b"", False
        with contextlib.suppress(aiohttp.ClientError):
            async with self.post(body, key) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if not has_begun and data.endswith(b"\n\n"):
                        has_begun = True
                        self.num_begun += 1
        return data

    async def total(self, name: str) -> float:
        """The sum of a metric over its labels, as one scrape has it."""

        async def scrape() -> str:
            async with self.session.get(f"{self.url}/metrics") as response:
                return await response.text() if response.status == 200 else ""

        text = await self.until(scrape)
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == f"epd_serve_{name}")


@pytest.fixture
async def crew(tmp_path) -> AsyncIterator[Callable[..., Any]]:
    """``await crew(fakes, **settings)`` → a gateway of two workers before them, all ready."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(fakes: list[Any], hang_timeout_s: float | None = None, **settings: Any) -> Crew:
            ports = {"port": free_port("127.0.0.1"), "admin": {"port": free_port("127.0.0.1"), "key": "secret"}}
            instances = {fake.name: fake.url for fake in fakes}
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            started = Crew(tmp_path / "deployment.yaml", {"workers": 2, "instances": instances} | ports, session)
            started.hang_timeout_s = hang_timeout_s
            started.write(**settings)
            command = [sys.executable, "-P", "-m", "epd_serve.cli", "proxy", "--config", str(started.file)]
            process = started.process = await asyncio.create_subprocess_exec(*command)

            async def end() -> None:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

            stack.push_async_callback(end)

            async def is_ready() -> bool:
                assert process.returncode is None
                states = [await is_up(started) for _ in range(6)]
                return all(states) and await started.all_workers() is not None

            await started.until(is_ready)
            return started

        yield start


async def is_up(crew: Crew) -> bool:
    async with crew.session.get(f"{crew.url}/health") as response:
        return response.status == 200


class Held:
    """Streams that have begun and end when they may."""

    def __init__(self, kit: Any, fake: Any) -> None:
        self.may_end = asyncio.Event()
        self.num_begun = 0
        script = [self._begin, kit.NONE, kit.FIRST, self.may_end.wait, kit.REST + kit.DONE]
        fake.scripts["/stage/prefill"] = lambda _: script

    def _begin(self) -> float:
        self.num_begun += 1
        return 0.0


async def test_several_workers_are_one_gateway(crew, fakes, kit):
    a0, a1 = await fakes("a0:EPD", "a1:EPD")
    gateway = await crew([a0], dashboard=True)
    held = Held(kit, a0)
    streams = [asyncio.create_task(gateway.stream(kit.chat(stream=True))) for _ in range(NUM_STREAMS)]

    async def all_run() -> list[int] | None:
        """How many at each worker, once each page shows them all."""
        running = [one["running"] for one in (await gateway.workers()).values()]
        shown = {sum(running), (await gateway.get("/requests"))["running"]}
        shown |= {await gateway.total("num_requests_running") for _ in range(6)}
        in_flight = (await gateway.get("/instances"))["instances"][0]["in_flight"]
        return running if shown == {NUM_STREAMS} and in_flight == {"P": NUM_STREAMS} else None

    running = await gateway.until(all_run)
    assert len(running) == 2 and all(running), "2 ** -15 that chance sends all to one"
    held.may_end.set()
    answers = await asyncio.gather(*streams)
    assert answers == [kit.FIRST + kit.REST + kit.DONE] * NUM_STREAMS

    async def all_counted() -> bool:
        return await gateway.total("requests_total") == NUM_STREAMS

    await gateway.until(all_counted)

    async def all_are_on_the_dashboard() -> bool:
        async with gateway.session.get(f"{gateway.url}/dashboard/data") as response:
            shown = await response.json()
        return shown["window"]["num_requests"] == NUM_STREAMS == len(shown["requests"])

    await gateway.until(all_are_on_the_dashboard)
    assert await gateway.order("/instances", name="a1", url=a1.url, lease_s=60) == 201
    assert await gateway.order("/admin/instances/a0/drain") == 200
    before = len(a0.calls)

    async def goes_to_a1() -> bool:
        return [await gateway.status(kit.chat()) for _ in range(12)] == [200] * 12

    await gateway.until(goes_to_a1)
    assert len(a0.calls) == before and len(a1.calls) >= 12, "both workers know of both"


async def test_a_worker_that_dies_takes_its_own_streams_along_and_comes_again(crew, fakes, kit):
    (a0,) = await fakes("a0:EPD")
    key = {"name": "mine", "hash": hash_key("mine"), "max_concurrent": NUM_STREAMS}
    gateway = await crew([a0], api_keys=[key])
    held = Held(kit, a0)
    body = kit.chat(stream=True)
    streams = [asyncio.create_task(gateway.stream(body, "mine")) for _ in range(NUM_STREAMS)]

    async def all_run() -> bool:
        return gateway.num_begun == NUM_STREAMS == (await gateway.get("/requests"))["running"]

    await gateway.until(all_run)
    assert {await gateway.status(body, "mine") for _ in range(6)} == {429}, "whichever worker it comes to"

    async def all_are_counted() -> bool:
        return await gateway.total("refused_total") == 6

    await gateway.until(all_are_counted)
    victim = (await gateway.workers())[0]  # the one with the admin plane
    os.kill(victim["pid"], signal.SIGKILL)

    async def is_back() -> bool:
        workers = await gateway.workers()
        return len(workers) == 2 and workers[0]["pid"] != victim["pid"]

    await gateway.until(is_back)
    assert await gateway.total("refused_total") == 6, "a counter that was seen does not fall"

    async def only_its_own_are_gone() -> bool:
        requests = await gateway.get("/requests")
        return requests["keys"][0]["active"] == NUM_STREAMS - victim["running"]

    await gateway.until(only_its_own_are_gone)
    more = [asyncio.create_task(gateway.stream(body, "mine")) for _ in range(victim["running"])]
    streams += more

    async def room_is_used() -> bool:
        return (await gateway.get("/requests"))["running"] == NUM_STREAMS

    await gateway.until(room_is_used)
    assert {await gateway.status(body, "mine") for _ in range(4)} == {429}
    held.may_end.set()
    answers = await asyncio.gather(*streams)
    assert answers.count(kit.FIRST + kit.REST + kit.DONE) == NUM_STREAMS
    assert answers.count(kit.FIRST) == victim["running"] > 0, "broken off, and not ended"

    async def nothing_is_left() -> bool:
        (one,) = (await gateway.get("/instances"))["instances"]
        return not one["in_flight"] and len(a0.cancelled) == victim["running"]

    await gateway.until(nothing_is_left)


async def test_reload_and_shutdown_reach_every_worker(crew, fakes, kit):
    a0, a1 = await fakes("a0:EPD", "a1:EPD")
    old, new = ({"name": name, "hash": hash_key(name)} for name in ("old", "new"))
    gateway = await crew([a0], api_keys=[old])
    gateway.write(api_keys=[new], instances={"a1": a1.url}, media={"max_pixels": 100})

    async def is_taken_over() -> bool:
        statuses = [
            (await gateway.status(kit.chat(), "old"), await gateway.status(kit.chat(), "new")) for _ in "1234"
        ]
        return set(statuses) == {(401, 200)}

    await gateway.until(is_taken_over)
    gateway.file.write_text("gateway: {nonsense: 1}")
    workers = await gateway.until(gateway.all_workers)
    os.kill(workers[1]["pid"], signal.SIGKILL)

    async def is_back() -> bool:
        return (await gateway.workers()).get(1, workers[1])["pid"] != workers[1]["pid"]

    await gateway.until(is_back)
    await gateway.until(is_taken_over)  # a file with a mistake is no reason to believe an older one
    picture = kit.data_url(kit.picture(20, 20))
    assert {await gateway.status(kit.chat(picture), "new") for _ in range(6)} == {400}
    held = Held(kit, a1)
    streams = [asyncio.create_task(gateway.stream(kit.chat(stream=True), "new")) for _ in range(NUM_STREAMS)]

    async def all_run() -> bool:
        return held.num_begun == NUM_STREAMS

    await gateway.until(all_run)
    workers = await gateway.until(gateway.all_workers)
    for one in (gateway.process.pid, *(worker["pid"] for worker in workers.values())):
        os.kill(one, signal.SIGTERM)  # a service manager tells all of them

    async def is_closed() -> bool:
        try:
            async with gateway.session.get(f"{gateway.url}/health/live"):
                pass
        except aiohttp.ClientConnectorError:
            return True
        return False

    await gateway.until(is_closed)
    held.may_end.set()
    assert await asyncio.gather(*streams) == [kit.FIRST + kit.REST + kit.DONE] * NUM_STREAMS
    assert await asyncio.wait_for(gateway.process.wait(), 240) == 0
    assert not any(os.path.exists(f"/proc/{worker['pid']}") for worker in workers.values())  # noqa: ASYNC240, PTH110


async def test_a_worker_that_hangs_is_killed_and_started_again(crew, fakes):
    gateway = await crew(await fakes("a0:EPD"), hang_timeout_s=1.5)
    hung = (await gateway.until(gateway.all_workers))[1]
    os.kill(hung["pid"], signal.SIGSTOP)

    async def is_back() -> bool:
        return (await gateway.workers()).get(1, hung)["pid"] != hung["pid"]

    await gateway.until(is_back)


async def test_what_a_gateway_lacks_is_said_once(tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text("gateway: {workers: 3, port: 0, access_log: /nowhere/log}\ninstances: {base_port: 7000}")
    command = [sys.executable, "-P", "-m", "epd_serve.cli", "proxy", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, words = await process.communicate()
    assert process.returncode == 2
    assert words.decode().count("/nowhere/log cannot be written") == 1
