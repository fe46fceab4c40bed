"""Real deployments: every instance and every gateway is a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_client import http_client
from metrics import metric_sums
from program import until
from servers import served

from benchmarks.ablations.processes import ablated
from epd_serve.config import DeploymentConfig, ShapeConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.supervisor import Backoff
from proxy.app import create_app
from proxy.http.server import new_server
from proxy.settings import GatewaySettings

#: Which instances of the fixture's fleet make up each topology.
TOPOLOGIES = {
    "EPD": ("epd0",),
    "EP-D": ("ep0", "d0"),
    "E-P-D": ("e0", "p0", "d0"),
    "(E-P)-D": ("e1", "p0", "d0"),
    "(E-D)-P": ("e0", "d0", "p0"),
    "(E-PD)": ("e0", "pd0"),
    "ED-P": ("ed0", "p0"),
    "2E-P-D": ("e0", "e1", "p0", "d0"),
    "P-D": ("p0", "d0"),
}
FLEET = "2E-P-D-EP-ED-PD-EPD"


@asynccontextmanager
async def deployed(
    topology: str,
    model: Path | ShapeConfig | None = None,
    *,
    gateway: Mapping[str, Any] | None = None,
    instances: Mapping[str, Any] | None = None,
    baselines: Mapping[str, Any] | None = None,
    backoff_s: float = 1.0,
    keep_logs: bool = False,
    **settings: Any,
) -> AsyncIterator[LocalDeployment]:
    """A deployment on free ports, of the demo model or of ``model`` as "tested", one compute thread an instance.

    ``gateway`` and ``instances`` are keys of these sections, ``settings`` those of the whole file; ``baselines``:
    see :func:`benchmarks.ablations.processes.use`.
    """
    named: dict[str, Any] = {} if model is None else {"model": model, "served_model_name": "tested"}
    if isinstance(model, Path):
        named |= {"model": str(model), "dtype": "float32"}
    config = DeploymentConfig.model_validate(
        {
            "topology": topology,
            "gateway": {"port": 0, **(gateway or {})},
            "instances": {"base_port": 0, "threads": 1, **(instances or {})},
            **named,
            **settings,
        }
    )
    backoff = Backoff(first_s=backoff_s, limit_s=backoff_s)
    with ablated(**(baselines or {})):
        made = LocalDeployment(config, ready_timeout_s=300, keep_logs=keep_logs, backoff=backoff)
    async with made as deployment:
        yield deployment


@asynccontextmanager
async def gateway(instances: Mapping[str, str], *, config: dict[str, Any] | None = None) -> AsyncIterator[str]:
    """One more gateway before instances (name → URL), in the test's loop; yields its URL once all are ready."""
    host = "127.0.0.1"
    app = create_app(GatewaySettings.of(DeploymentConfig.model_validate(config or {}), host), [*instances.items()])
    async with served(new_server(app, host, 0)) as url, http_client() as client:

        async def is_ready() -> bool:
            known = (await client.get(f"{url}/health")).json()["instances"].values()
            return all(one["ready"] for one in known)

        await until(is_ready)
        yield url


async def until_decoding(url: str, *asked: asyncio.Task[Any]) -> bool:
    """Wait until an instance holds blocks for requests; False where all that was asked was answered before."""
    async with http_client() as client, asyncio.timeout(300):
        while not (await client.get(f"{url}/integrity")).json()["blocks"]:
            if asked and all(task.done() for task in asked):
                return False
            await asyncio.sleep(0.01)
    return True


async def figures(url: str) -> dict[str, float]:
    """The sum of each metric of an instance over its labels."""
    async with http_client() as client:
        return metric_sums((await client.get(f"{url}/metrics")).text, "epd_serve_instance_")


@dataclass(frozen=True)
class Books:
    """Check an idle deployment: books that balance and nothing in use."""

    urls: Mapping[str, str]

    @classmethod
    def of(cls, deployment: LocalDeployment) -> Books:
        return cls({name: handle.url for name, handle in deployment.instances.items()})

    async def check(self, timeout_s: float = 100) -> None:
        """Clean-up after a cancellation runs in the background, so "all free" is awaited, not demanded at once."""
        async with http_client() as client:
            deadline = time.monotonic() + timeout_s
            while True:
                state = {name: (await client.get(f"{url}/integrity")) for name, url in self.urls.items()}
                wrong = {name: answer.text for name, answer in state.items() if answer.status_code != 200}
                assert not wrong
                in_use = {n: a.json() for n, a in state.items() if any(a.json().values())}
                if not in_use:
                    return
                assert time.monotonic() < deadline, f"still in use: {json.dumps(in_use)}"
                await asyncio.sleep(0.1)
