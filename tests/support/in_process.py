"""A whole deployment inside the test's process and loop: real instances, sockets and gateway, cheap to start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from gateway_settings import gateway_settings
from servers import served

from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.instance.http import LookApp
from epd_serve.instance.instance import Instance
from epd_serve.rpc.server import LinkService
from epd_serve.types import Role
from proxy.app import create_app
from proxy.http.server import new_server


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
            blocks = [block.splitlines()[-1] for block in (await response.text()).split("\n\n") if block]
        data = [block.removeprefix("data: ") for block in blocks]
        return [json.loads(one) for one in data if one != "[DONE]"]

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
            chosen: dict[str, Any] = {
                "dtype": "float32",  # in bfloat16 the last bit depends on what else is in a batch
                "threads": 1,
                "num_blocks": 256,
                "block_size": 16,
                "max_model_len": 768,
                **(options or {}),
            }
            name = f"{role.lower()}{number}"
            chosen.update((of or {}).get(name, {}))
            instance = Instance(
                InstanceOptions(
                    name=name, role=Role.parse(role), model=model, served_model_name="demo", port=0, **chosen
                )
            )
            service = LinkService(calls=instance.handlers())
            config = uvicorn.Config(
                LookApp(service),
                port=0,
                http=service.protocol,
                lifespan="off",
                log_level="critical",
                timeout_keep_alive=75,
            )
            instance.url = await stack.enter_async_context(served(uvicorn.Server(config)))
            stack.push_async_callback(instance.close)
            await instance.start()
            instances[name] = instance
        app = create_app(
            gateway_settings(**settings), [(name, instance.url) for name, instance in instances.items()]
        )
        url = await stack.enter_async_context(served(new_server(app, "127.0.0.1", 0)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Deployment(url, instances, session, app)
