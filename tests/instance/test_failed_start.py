"""An instance whose port is taken says so in a sentence."""

from __future__ import annotations

import socket

import pytest
import uvicorn
from fastapi import FastAPI

from epd_serve.instance.main import _Server


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = _Server(uvicorn.Config(FastAPI(), port=port, lifespan="off", log_config=None))
        with pytest.raises(ValueError, match=rf"cannot listen on .* port {port}: .*address already in use"):
            await server.serve()
