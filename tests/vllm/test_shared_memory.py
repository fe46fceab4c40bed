"""Nothing of a deployment stays in shared memory, however its processes end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import ask, up

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def shared() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("killed", [None, "first"])
@pytest.mark.parametrize("topology", ["EPD", "P-D", "E-PD", "E-P-D"])
def test_nothing_stays(
    topology: str, killed: str | None, python: str, model: Path, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    before = shared()
    with up(python, topology, model, tmp_path) as deployment:
        text = next(one for one in asked if "image_url" not in str(one["messages"]))
        ask(deployment.url, text)
        assert shared() > before, "vLLM's processes talk through it"
        if killed:
            os.kill(deployment.pid(next(iter(deployment.urls))), signal.SIGKILL)
    assert shared() <= before
