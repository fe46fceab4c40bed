"""Instances and whole deployments inside the test's process and loop: real sockets and gateway, cheap to start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from chat import stream_events
from gateway_settings import gateway_settings
from program import until
from servers import served

from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.instance.calls import LookApp, Peers
from epd_serve.instance.instance import Instance
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link, LinkCall
from epd_serve.rpc.server import LinkService
from epd_serve.types import Role
from proxy.app import create_app
from proxy.http.server import new_server


@asynccontextmanager
async def serving(model: Path | ShapeConfig, role: str, **options: Any) -> AsyncIterator[Instance]:
    """An instance with all its services, named after its role unless ``options`` say otherwise."""
    usual = {"name": role.lower(), "served_model_name": "tiny", "port": 0, "dtype": "float32", "block_size": 8}
    # in bfloat16 the last bit depends on what else is in a batch
    instance = Instance(InstanceOptions(role=Role.parse(role), model=model, **{**usual, **options}))
    service = LinkService(calls=instance.handlers())
    config = uvicorn.Config(
        LookApp(service), port=0, http=service.protocol, lifespan="off", log_config=None, timeout_keep_alive=75
    )
    async with served(uvicorn.Server(config)) as instance.url:
        try:
            await instance.start()
            yield instance
        finally:
            await instance.close()


@asynccontextmanager
async def answering(instance: Instance, body: bytes) -> AsyncIterator[LinkCall]:
    """A prompt's streamed answer whose head is here."""
    async with Link(instance.options.name, instance.url) as link:
        call = LinkCall(link, "/stage/prefill", [body])
        link.send(call)
        await call.opened
        yield call
        call.close()


@asynccontextmanager
async def held(instance: Instance) -> AsyncIterator[None]:
    """KV that somebody may still announce keeps the instance from being empty."""
    peers = Peers()
    layout, ref = instance.require_decoder().memory.layout, wire.TransferRef("t", "r")
    nowhere = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)
    reserve = wire.ReserveRequest("t", "r", 8, 8, 1, [], layout, 3600, nowhere)
    await peers.call(instance.url, "/kv/reserve", reserve)
    try:
        yield
    finally:
        await peers.call(instance.url, "/kv/cancel", ref)
        await peers.close()


@dataclass
class Deployment:
    url: str
    instances: dict[str, Instance]
    session: aiohttp.ClientSession
    app: Any

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.session.post(self.url + path, json=body, **more) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed answer, without ``[DONE]``."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return stream_events(text, has_end="data: [DONE]" in text)

    async def settle(self, timeout_s: float = 300) -> None:
        """Wait until nothing is in use; the books must balance."""
        for _ in range(int(timeout_s / 0.02)):
            in_use = {n: i.in_use() for n, i in self.instances.items() if any(i.in_use().values())}
            if not in_use:
                break
            await asyncio.sleep(0.02)
        assert not in_use
        for instance in self.instances.values():
            instance.check_integrity()


@asynccontextmanager
async def deployment(
    model: Path | ShapeConfig,
    *roles: str,
    options: Mapping[str, Any] | None = None,
    of: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[Deployment]:
    """``deployment(path, "EP", "D")``: instances ep0 and d1, and a gateway.

    ``options`` are those of all instances, ``of`` those of some, by name, ``settings`` the gateway's.
    """
    async with AsyncExitStack() as stack:
        instances: dict[str, Instance] = {}
        for number, role in enumerate(roles):
            name = f"{role.lower()}{number}"
            chosen = {"threads": 1, "num_blocks": 256, "block_size": 16, "max_model_len": 768, **(options or {})}
            chosen |= {"name": name, "served_model_name": "demo", **(of or {}).get(name, {})}
            instances[name] = await stack.enter_async_context(serving(model, role, **chosen))
        app = create_app(
            gateway_settings(**settings), [(name, instance.url) for name, instance in instances.items()]
        )
        url = await stack.enter_async_context(served(new_server(app, "127.0.0.1", 0)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        table = app.state.gateway.fleet.table  # else P encodes what E would
        await until(lambda: all(record.ready for record in table), 120)
        yield Deployment(url, instances, session, app)
