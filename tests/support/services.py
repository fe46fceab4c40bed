"""Instances with all their services and real sockets in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from servers import served

from epd_serve.config import InstanceOptions
from epd_serve.instance.http import LookApp, Peers
from epd_serve.instance.instance import Instance
from epd_serve.instance.language_engine import LanguageEngine
from epd_serve.launch.processes.ports import free_port
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link, LinkCall
from epd_serve.rpc.server import LinkService
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
    service = LinkService(calls=instance.handlers())
    config = uvicorn.Config(
        LookApp(service), port=instance.options.port, lifespan="off", log_config=None, http=service.protocol
    )
    server = uvicorn.Server(config)
    async with served(server):
        try:
            yield instance
        finally:
            server.should_exit = True
            await instance.close()


def language_of(instance: Instance) -> LanguageEngine:
    assert instance.language is not None
    return instance.language


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
    assert instance.language is not None
    peers = Peers()
    layout, ref = instance.language.weights.memory.layout, wire.TransferRef("t", "r")
    nowhere = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)
    reserve = wire.ReserveRequest("t", "r", 8, 8, 1, [], layout, 3600, nowhere)
    await peers.call(instance.url, "/kv/reserve", reserve)
    try:
        yield
    finally:
        await peers.call(instance.url, "/kv/cancel", ref)
        await peers.close()
