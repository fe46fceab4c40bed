"""The admin API over many hosts: the gateway's file is changed, agents' logs are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority
from fastapi import FastAPI

from epd_serve.config import load_config
from epd_serve.launch.processes.ports import free_port
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.launch.remote.agent import _served
from epd_serve.rpc.tls import TlsFiles
from proxy.admin.hosts import deployment_router, hosts_router
from proxy.admin.rollout import GatewayFiles
from proxy.http.asgi import install_error_handlers
from proxy.settings import Current, GatewaySettings

KEY = "a-cluster-key-of-tests"


class Gateway:
    """The routers of a gateway's file, which is taken over at once."""

    def __init__(self, file: Path, tls: TlsFiles | None = None) -> None:
        self.file = file
        self._tls = tls
        self.settings = Current(self.read())
        app = FastAPI()
        files = GatewayFiles(file, self.reload, lambda config: [])
        app.include_router(deployment_router(self.settings, lambda: files))
        app.include_router(hosts_router(self.settings, lambda: files))
        install_error_handlers(app)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    def read(self) -> GatewaySettings:
        return GatewaySettings(config=load_config(self.file), cluster_key=KEY, tls=self._tls)

    def reload(self) -> None:
        self.settings.now = self.read()

    async def put(self, keys: Any) -> tuple[int, Any]:
        answer = await self.client.put("/deployment", json=keys)
        return answer.status_code, answer.json()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    file = tmp_path / "deployment.yaml"
    file.write_text(
        "topology: P-D\ndevices: [n1/cpu, n2/cpu]\n"
        "hosts: {n1: {address: 127.0.0.1}, n2: {address: 127.0.0.2}}\n"
        f"instances: {{base_port: {free_port('127.0.0.1') + 1}}}\n"
    )
    made = Gateway(file)
    yield made
    await made.client.aclose()


async def test_the_file_is_changed(gateway: Gateway) -> None:
    told = (await gateway.client.get("/deployment")).json()
    now = told["keys"]
    assert now["topology"] == "P-D" and set(now) == {"topology", "devices", "hosts", "instances"}
    assert (await gateway.put({**now, "topology": "D-P"}))[0] == 200
    changed = (await gateway.client.get("/deployment")).json()
    assert changed["keys"]["topology"] == "D-P" and changed["written"] > told["written"]
    assert load_config(gateway.file).placement()[0].host == "n1"
    before = gateway.file.read_text()
    for keys, sentence in (
        ({**now, "topology": "P-2D"}, "needs 3 devices"),
        ({**now, "devices": ["n1/cpu", "n7/cpu"]}, "n7 is not among hosts"),
        ({**now, "gateway": {"access_log": "/etc/passwd"}}, "gateway is not changed from elsewhere"),
    ):
        status, refusal = await gateway.put(keys)
        assert status == 400 and sentence in refusal["error"]["message"], refusal
    assert gateway.file.read_text() == before
    gateway.file.write_text("topology: P-D\n")
    gateway.reload()
    assert (await gateway.put(now))[0] == 400, "it has no hosts"


async def test_logs_of_agents(gateway: Gateway, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "n1-p0.log").write_text("".join(f"line {number}\n" for number in range(50)) + "half a")
    port = gateway.settings.now.config.agent_port
    supervisor = Supervisor([], logs)
    async with _served("127.0.0.1", port, supervisor, logs, KEY), httpx.AsyncClient() as stranger:
        agent = f"http://127.0.0.1:{port}"
        assert (await stranger.get(f"{agent}/health/live")).status_code == 200
        assert (await stranger.get(f"{agent}/health/ready")).status_code == 503
        await supervisor.start()
        assert (await stranger.get(f"{agent}/health/ready")).status_code == 200
        assert (await stranger.get(f"{agent}/logs/n1-p0")).status_code == 403
        shown = (await gateway.client.get("/logs")).json()["logs"]
        assert shown["n1"] == ["n1-p0"] and "n2" in shown["n2"], "n2 does not answer, and why"
        piece = (await gateway.client.get("/logs/n1/n1-p0")).json()
        assert piece["text"].splitlines()[0] == "line 30" and piece["text"].endswith("line 49\n"), "whole lines"
        piece = (await gateway.client.get("/logs/n1/n1-p0?after=14")).json()
        assert piece["text"].startswith("line 2\n") and piece["text"].endswith("line 49\n")
        assert (await gateway.client.get(f"/logs/n1/n1-p0?after={piece['end']}")).json()["text"] == ""
        for path, sentence in (("/logs/n7/n1-p0", "no host 'n7'"), ("/logs/n1/deployment", "no log")):
            refused = await gateway.client.get(path)
            assert refused.status_code in (400, 404) and sentence in refused.text, refused.text


async def test_agents_speak_tls_where_the_deployment_does(tmp_path: Path, gateway: Gateway) -> None:
    tls = Authority(tmp_path).files("host")
    of_tls, logs = Gateway(gateway.file, tls), tmp_path / "logs"
    logs.mkdir()
    (logs / "n1-p0.log").write_text("line\n")
    port = gateway.settings.now.config.agent_port
    async with _served("127.0.0.1", port, Supervisor([], logs), logs, KEY, tls), of_tls.client:
        assert (await of_tls.client.get("/logs")).json()["logs"]["n1"] == ["n1-p0"]
        assert isinstance((await gateway.client.get("/logs")).json()["logs"]["n1"], str), "one that speaks none"
