"""A gateway and instances, each on a host of its own, and a client beside the gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat import chat
from hosts import Hosts, hosts

from epd_serve.config.keys import ADMIN_KEY
from epd_serve.launch.processes.process import RunningProcess
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.rpc.link import Link

_KEYS = {ADMIN_KEY: "admin-key-of-the-tests", CLUSTER_KEY: "cluster-key-of-the-tests"}
_PORT, _ADMIN_PORT, _INSTANCE_PORT = 8000, 8001, 8100
_GATEWAY = "gw"
#: It computes nothing, so that an instance needs no torch and starts in a second; all else is real.
_MODEL = {
    "model": {"shape_of": "qwen2.5-vl-7b"},
    "served_model_name": "demo",
    "devices": ["emulated:h200 x 3"],
    "instances": {"kv_cache_bytes": "1792MiB", "max_model_len": 8192},
}


@dataclass(frozen=True)
class Streamed:
    """An answer that was streamed, and the longest time without a piece of it."""

    text: str
    gap_s: float


class Fleet:
    """Its instances are named like their hosts, by role and number."""

    def __init__(self, lab: Hosts, file: Path, session: aiohttp.ClientSession, *, joined: bool) -> None:
        self.hosts = lab
        self.file = file
        self._session = session
        self._joined = joined

    @property
    def _url(self) -> str:
        return f"http://{self.hosts[_GATEWAY].ip}"

    async def start(self, name: str) -> None:
        """An instance, on the host of its name."""
        ip = self.hosts[name].ip
        role = name.rstrip("0123456789").upper()
        join = ["--join", f"{self._url}:{_ADMIN_PORT}"] if self._joined else []
        command = ["epd_serve.cli", "instance", "--name", name, "--role", role, "--host", ip]
        command += ["--port", str(_INSTANCE_PORT), "--threads", "1", "--config", str(self.file), *join]
        command += ["--device", "emulated:h200:0"]
        await self.hosts[name].start(name, command, **_KEYS)

    async def start_unit(self, host: str, command: Sequence[str]) -> RunningProcess:
        """The command of a pod, as Kubernetes would write it there, with the gateway's address for its name."""
        words = {"$(POD_NAME)": host, "$(POD_IP)": self.hosts[host].ip}
        command = [
            words.get(word, word).replace("//epd-admin", self._url.removeprefix("http:")) for word in command
        ]
        return await self.hosts[host].start(host, ["epd_serve.cli", *command[1:]], **_KEYS)

    async def instances(self) -> dict[str, dict[str, Any]]:
        """As the admin plane shows them."""
        headers = {"authorization": f"Bearer {_KEYS[ADMIN_KEY]}"}
        async with self._session.get(f"{self._url}:{_ADMIN_PORT}/instances", headers=headers) as answer:
            return {one["name"]: one for one in (await answer.json())["instances"]}

    async def num_served(self, name: str) -> float:
        """Stages of requests that an instance has completed."""
        async with self._session.get(f"http://{self.hosts[name].ip}:{_INSTANCE_PORT}/metrics") as answer:
            samples = [line.rsplit(" ", 1) for line in (await answer.text()).splitlines()]
        return sum(float(value) for series, value in samples if "stage_seconds_count" in series)

    def held(self, name: str) -> dict[str, int]:
        """The blocks and features that an instance holds, as its own host sees it."""
        host = self.hosts[name]

        async def ask() -> bytes:
            async with Link(name, f"http://{host.ip}:{_INSTANCE_PORT}", _KEYS[CLUSTER_KEY]) as link:
                return await link.ask("/integrity")

        held: dict[str, int] = json.loads(host.run(lambda: asyncio.run(ask())))
        return held

    async def ready(self, *names: str) -> None:
        async with asyncio.timeout(300):
            while True:
                with suppress(aiohttp.ClientError):
                    here = await self.instances()
                    if all(name in here and here[name]["ready"] for name in names):
                        return
                await asyncio.sleep(0.05)

    async def ask(self, body: dict[str, Any]) -> tuple[int, str, float]:
        """Status, text (or what was wrong), seconds."""
        asked_at = time.monotonic()
        async with self._session.post(f"{self._url}:{_PORT}/v1/chat/completions", json=body) as answer:
            said = await answer.json()
            took_s = time.monotonic() - asked_at
        if answer.status != 200:
            return answer.status, said["error"]["message"], took_s
        return 200, said["choices"][0]["message"]["content"], took_s

    async def stream(self, body: dict[str, Any], began: asyncio.Event | None = None) -> Streamed:
        """``began`` is set with its tenth piece."""
        text, gap_s, last, count = "", 0.0, 0.0, 0
        body = {**body, "stream": True}
        async with self._session.post(f"{self._url}:{_PORT}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                now = time.monotonic()
                gap_s, last, count = max(gap_s, now - last if last else 0.0), now, count + 1
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if began is not None and count == 10:
                    began.set()
        return Streamed(text, gap_s)


@asynccontextmanager
async def _fleet(
    log_dir: Path, *names: str, joined: bool = True, spares: tuple[str, ...] = (), **gateway: Any
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        lab = await stack.enter_async_context(hosts([_GATEWAY, *names, *spares], log_dir))
        given = {} if joined else {name: f"http://{lab[name].ip}:{_INSTANCE_PORT}" for name in names}
        config = {
            "host": "0.0.0.0",
            "port": _PORT,
            "admin": {"host": "0.0.0.0", "port": _ADMIN_PORT, "key": {"env": ADMIN_KEY}},
            "instances": given,
            **gateway,
        }
        file = log_dir / "gateway.yaml"
        file.write_text(json.dumps({"gateway": config, **_MODEL}))
        await lab[_GATEWAY].start("gateway", ["epd_serve.cli", "proxy", "--config", str(file)], **_KEYS)
        connector = aiohttp.TCPConnector(socket_factory=lab[_GATEWAY].socket, force_close=True)
        timeout = aiohttp.ClientTimeout(total=300)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        fleet = Fleet(lab, file, await stack.enter_async_context(session), joined=joined)
        for name in names:
            await fleet.start(name)
        await fleet.ready(*names)
        yield fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``async with fleet("e0", "p0", "d0", joined=True, spares=("d1",), **gateway) as running``: all are ready."""

    def make(*names: str, **more: Any) -> Any:
        return _fleet(tmp_path_factory.mktemp("hosts"), *names, **more)

    return make


@pytest.fixture
def long_text() -> dict[str, Any]:
    """A long answer, of tokens that the model itself would not stop at."""
    return chat("Count to 9.", max_tokens=400, ignore_eos=True)
