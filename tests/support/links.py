"""Servers of links in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from servers import served

from epd_serve.instance.calls import LookApp
from epd_serve.rpc.cluster import Service
from epd_serve.rpc.server import Handler, LinkService


def link_server(
    calls: Mapping[str, Handler],
    key: str | None = None,
    own_address: Callable[[], str] = lambda: "",
    service: Service = "instance",
    **options: Any,
) -> uvicorn.Server:
    """A server as an instance has it; ``options`` are uvicorn's."""
    proven = LinkService(calls=calls, key=key, own_address=own_address, service=service)
    config: dict[str, Any] = {"port": 0, "lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 1}
    return uvicorn.Server(uvicorn.Config(LookApp(proven), http=proven.protocol, **(config | options)))


@asynccontextmanager
async def linked(calls: Mapping[str, Handler], key: str | None = None, **options: Any) -> AsyncIterator[str]:
    """The URL of :func:`link_server` while it serves."""
    async with served(link_server(calls, key, **options)) as url:
        yield url
