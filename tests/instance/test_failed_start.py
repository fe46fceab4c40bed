"""An instance that cannot start says why, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from epd_serve.config import InstanceOptions
from epd_serve.demo import weights_dir
from epd_serve.instance.instance import Instance
from epd_serve.instance.main import _Server
from epd_serve.types import Role


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_store": "mooncake"}, "needs the address of its master"),
        (
            {"feature_store": "mooncake", "mooncake": {"master": "127.0.0.1:9"}, "feature_cache_bytes": 1 << 20},
            "at least 16777216 bytes",
        ),
    ],
)
async def test_a_start_that_fails_leaves_no_session_open(change: dict[str, Any], message: str) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    options = InstanceOptions(
        name="e0", role=Role.parse("E"), model=weights_dir(), served_model_name="tiny", dtype="float32", **change
    )
    instance = Instance(options)
    with pytest.raises(ValueError, match=message):
        await instance.start()
    instance.transport.close()
    del instance
    gc.collect()
    assert complaints == []


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = _Server(uvicorn.Config(FastAPI(), port=port, lifespan="off", log_config=None))
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127[.]0[.]0[.]1 port {port}: .*address already in use"
        ):
            await server.serve()
