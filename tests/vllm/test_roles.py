"""vLLM instances that change their roles while they run, and a deployment of them that is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_runs import Deployment, Tokens, ask_all, figures, same, up

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
EXTERNAL = "prompt_tokens_by_source_total external_kv_transfer"


def switch(deployment: Deployment, name: str, role: str) -> tuple[int, str]:
    body = {"role": role, "deadline_s": 120}
    answer = httpx.post(f"{deployment.admin}/instances/{name}/role", json=body, trust_env=False, timeout=200)
    return answer.status_code, answer.text


def roles(deployment: Deployment) -> dict[str, str]:
    told = httpx.get(f"{deployment.admin}/admin/instances", trust_env=False, timeout=60).json()["instances"]
    return {one["name"]: one["role"] for one in told if one["ready"]}


def test_p_and_d_change_places_under_load_and_the_rest_is_started_before_others_stop(
    python: str, model: Path, asked: list[dict[str, Any]], expected: list[Tokens], tmp_path: Path
) -> None:
    with up(python, "E-2P-D", model, tmp_path) as deployment:
        pids = {name: deployment.pid(name) for name in deployment.urls}

        def check() -> None:
            assert all(map(same, ask_all(deployment.url, asked), expected))

        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(check)
            assert switch(deployment, "p1", "D")[0] == 200
            under_way.result()
        assert roles(deployment) == {"e0": "E", "p0": "P", "p1": "D", "d0": "D"}
        check()
        assert figures(deployment.urls["p1"])[EXTERNAL] > 0, "p1 has computed the prompts itself"
        assert switch(deployment, "p0", "D")[0] == 409, "it is the only P"
        assert switch(deployment, "e0", "P")[0] == 400
        assert switch(deployment, "d0", "P")[0] == switch(deployment, "p0", "D")[0] == 200
        check()
        assert figures(deployment.urls["p0"])[EXTERNAL] > 0
        assert {name: deployment.pid(name) for name in deployment.urls} == pids, "no process was started again"
        for name in deployment.urls:
            deployment.check_idle(name)

        file = tmp_path / "other.yaml"
        config = json.loads((tmp_path / "deployment.yaml").read_text())
        file.write_text(json.dumps({**config, "topology": "2E-P-D"}))
        port = deployment.url.rpartition(":")[2]
        command = [sys.executable, "-P", "-m", "epd_serve.cli", "apply", str(file), "--deployment", port]
        applied = subprocess.run([*command, "--deadline", "900"], capture_output=True, text=True)
        assert applied.returncode == 0, applied.stdout + applied.stderr + deployment.tail()
        assert applied.stdout.index("start e1 (E)") < applied.stdout.index("stop "), applied.stdout
        deployment.wait_until(partial(deployment.is_ready, "e1"), "e1 is ready")
        assert sorted(roles(deployment).values()) == ["D", "E", "E", "P"]
        check()
