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
from vllm_runs import Deployment, ask_all, figures, same, up

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]
EXTERNAL = "prompt_tokens_by_source_total external_kv_transfer"


def switch(deployment: Deployment, name: str, role: str) -> int:
    body = {"role": role, "deadline_s": 120}
    answer = httpx.post(f"{deployment.admin}/instances/{name}/role", json=body, trust_env=False, timeout=200)
    return answer.status_code


def roles(deployment: Deployment) -> dict[str, str]:
    told = httpx.get(f"{deployment.admin}/admin/instances", trust_env=False, timeout=60).json()["instances"]
    return {one["name"]: one["role"] for one in told if one["ready"]}


def test_p_and_d_change_places_under_load_and_the_rest_is_started_before_others_stop(
    python: str, model: Path, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    with up(python, "E-P-PD", model, tmp_path) as deployment:
        pids = {name: deployment.pid(name) for name in deployment.urls}
        expected = ask_all(deployment.urls["pd0"], asked)  # by itself it is vLLM alone

        def check() -> None:
            answers = ask_all(deployment.url, asked)
            wrong = [index for index, pair in enumerate(zip(answers, expected, strict=True)) if not same(*pair)]
            assert not wrong, [(index, answers[index], expected[index]) for index in wrong]

        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(check)
            assert switch(deployment, "pd0", "D") == 200
            under_way.result()
        assert roles(deployment) == {"e0": "E", "p0": "P", "pd0": "D"}
        taken = figures(deployment.urls["pd0"])[EXTERNAL]
        check()
        assert figures(deployment.urls["pd0"])[EXTERNAL] > taken, "D has computed the prompts itself"
        assert switch(deployment, "p0", "D") == 409, "it is the only P"
        assert switch(deployment, "e0", "P") == 400
        assert [switch(deployment, *one) for one in (("p0", "PD"), ("pd0", "P"), ("p0", "D"))] == [200] * 3
        check()
        assert figures(deployment.urls["p0"])[EXTERNAL] > 0, "the former P takes KV"
        assert {name: deployment.pid(name) for name in deployment.urls} == pids, "no process was started again"
        for name in deployment.urls:
            deployment.check_idle(name)

        file = tmp_path / "other.yaml"
        config = json.loads((tmp_path / "deployment.yaml").read_text())
        file.write_text(json.dumps({**config, "topology": "2E-PD"}))
        port = deployment.url.rpartition(":")[2]
        command = [sys.executable, "-P", "-m", "epd_serve.cli", "apply", str(file), "--deployment", port]
        refused = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
        assert refused.returncode and "hand on features by store and KV by grouped" in refused.stderr, refused
        file.write_text(json.dumps({**config, "topology": "2E-P-D"}))
        applied = subprocess.run([*command, "--deadline", "1200"], capture_output=True, text=True)
        assert applied.returncode == 0, applied.stdout + applied.stderr + deployment.tail()
        deployment.wait_until(partial(deployment.is_ready, "e1"), "e1 is ready")
        assert roles(deployment) == {"e0": "E", "e1": "E", "p0": "D", "pd0": "P"}
        file.write_text(json.dumps({**config, "topology": "E-PD-P"}))
        applied = subprocess.run([*command, "--deadline", "300"], capture_output=True, text=True)
        assert applied.returncode == 0, applied.stdout + applied.stderr + deployment.tail()
        assert sorted(roles(deployment).values()) == ["E", "P", "PD"], applied.stdout
        check()
