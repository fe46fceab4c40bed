"""A stream of several choices whose decode instance dies: an error that says so, and nothing is held."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest
from chat import chat
from fleet import Books
from http_client import http_client

from epd_serve.config import DeploymentConfig
from epd_serve.errors import CHOICES_LOST
from epd_serve.launch.deployment import LocalDeployment


async def test_several_choices_end_with_an_error_when_d_dies() -> None:
    config = DeploymentConfig(
        topology="P-D", restart="never", gateway={"port": 0}, instances={"base_port": 0, "threads": 1}
    )
    body = chat("Count to 9.", max_tokens=1000, ignore_eos=True, stream=True, n=3)
    events: list[dict[str, Any]] = []
    async with (
        LocalDeployment(config, ready_timeout_s=300) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            with pytest.raises(httpx.RemoteProtocolError):  # no clean end
                async for line in response.aiter_lines():
                    if line:
                        events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 30:
                        os.kill(deployment.instances["d0"].pid, signal.SIGKILL)
        assert events[-1]["error"]["code"] == CHOICES_LOST
        await Books({"p0": deployment.instances["p0"].url}).check()
