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
from vllm_runs import Deployment, ask_all, check_all, figures, up

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]
EXTERNAL = "prompt_tokens_by_source_total external_kv_transfer"


def switch(deployment: Deployment, name: str, role: str) -> int:
    body = {"role": role, "deadline_s": 120}
    answer = httpx.post(f"{deployment.admin}/instances/{name}/role", json=body, trust_env=False, timeout=200)
    return answer.status_code


def roles(deployment: Deployment) -> dict[str, str]:
    told = httpx.get(f"{deployment.admin}/instances", trust_env=False, timeout=60).json()["instances"]
    return {one["name"]: one["role"] for one in told if one["ready"]}


def test_p_and_d_change_places_under_load_and_the_rest_is_started_before_others_stop(
    python: str, model: Path, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    with up(python, "E-P-D", model, tmp_path) as deployment:
        pids = {name: deployment.pid(name) for name in deployment.urls}
        expected = ask_all(deployment.urls["d0"], asked)  # by itself it is vLLM alone

        check = partial(check_all, deployment.url, asked, expected)
        assert switch(deployment, "p0", "D") == 409, "it is the only P"
        assert switch(deployment, "e0", "P") == 400
        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(check)
            assert [switch(deployment, *one) for one in (("p0", "PD"), ("d0", "P"), ("p0", "D"))] == [200] * 3
            under_way.result()
        assert roles(deployment) == {"e0": "E", "p0": "D", "d0": "P"}
        taken = figures(deployment.urls["p0"])[EXTERNAL]
        check()
        assert figures(deployment.urls["p0"])[EXTERNAL] > taken, "D has computed the prompts itself"
        assert {name: deployment.pid(name) for name in deployment.urls} == pids, "no process was started again"
        for name in deployment.urls:
            deployment.check_idle(name)

        file = tmp_path / "other.yaml"
        config = json.loads((tmp_path / "deployment.yaml").read_text())
        port = deployment.url.rpartition(":")[2]
        command = [sys.executable, "-P", "-m", "epd_serve.cli", "apply", str(file), "--deployment", port]

        def apply(topology: str) -> tuple[int, str]:
            file.write_text(json.dumps({**config, "topology": topology}))
            done = subprocess.run([*command, "--deadline", "1200"], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

        code, told = apply("E-PD")
        assert code and "the file's would do it by store and None" in told, told
        code, told = apply("2E-P-D")
        assert code == 0 and "start e1 (E)" in told, told + deployment.tail()
        deployment.wait_until(partial(deployment.is_ready, "e1"), "e1 is ready")
        assert roles(deployment) == {"e0": "E", "e1": "E", "p0": "D", "d0": "P"}
        code, told = apply("E-P-D")
        assert code == 0 and "stop e" in told, told
        assert sorted(roles(deployment).values()) == ["D", "E", "P"], told
        check()
