"""Instances with all their services and real sockets in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fleet import wait_until

from epd_serve.config import InstanceOptions
from epd_serve.instance.http import ControlApp
from epd_serve.instance.instance import Instance
from epd_serve.launch.ports import free_port
from epd_serve.types import Role


@asynccontextmanager
async def serving(path: Path, role: str, **options: Any) -> AsyncIterator[Instance]:
    """An instance with the model in ``path``, named after its role unless ``options`` say otherwise."""
    instance = Instance(
        InstanceOptions(
            role=Role.parse(role),
            model=path,
            served_model_name="tiny",
            port=free_port("127.0.0.1"),
            dtype="float32",
            block_size=8,
            **{"name": role.lower(), **options},
        )
    )
    await instance.start()
    app = ControlApp(instance.routes())
    server = uvicorn.Server(uvicorn.Config(app, port=instance.options.port, lifespan="off", log_config=None))
    running = asyncio.create_task(server._serve())
    await asyncio.to_thread(wait_until, lambda: server.started, "the server has started")
    try:
        yield instance
    finally:
        server.should_exit = True
        await instance.close()
        await running
