"""Every file in deploy/, as a user runs it: ready, the README's questions answered, stopped without a trace."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest
from chat import chat
from fleet import Books
from http_client import http_client
from program import wait_until
from transports import needs_mooncake

from epd_serve.config import change_config, load_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes import supervisor
from epd_serve.telemetry.breakdown import read_traces

ROOT = Path(__file__).parents[2]
FILES = [
    pytest.param(
        file,
        id=file.stem,
        marks=[needs_mooncake] * ("mooncake" in file.stem) + [pytest.mark.slow] * (file.stem != "cpu-e-p-d"),
    )
    for file in sorted((ROOT / "deploy").glob("cpu-*.yaml"))
]
PICTURE = (ROOT / "docs" / "images" / "three-shapes.png").read_bytes()
GIB = 1 << 30


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def left_behind(before: set[Path]) -> set[Path]:
    """New files that no process has mapped, by inode: a semaphore is mapped under an earlier name than its own."""
    new: dict[Path, int] = {}
    for path in shared_memory() - before:
        with suppress(FileNotFoundError):
            new[path] = path.stat().st_ino
    used: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with suppress(OSError):
            used |= {int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {path for path, inode in new.items() if inode not in used and path.exists()}


@pytest.mark.parametrize("file", FILES)
async def test_each_deployment_answers_the_questions_of_the_readme(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(supervisor.GRACES_S, "then", 20.0)  # a busy machine may take longer to write traces
    changes = {"gateway": {"port": 0}, "instances": {"base_port": 0}, "trace": str(tmp_path)}
    config = change_config(load_config(file), changes)
    before = shared_memory()
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        pids = [process.pid for process in deployment.processes]
        async with http_client() as control:
            for handle in deployment.instances.values():
                held = (await control.get(f"{handle.url}/info")).json()["parameters"]
                assert bool(held["tower"]) == handle.role.encodes
                assert bool(held["language_model"]) == handle.role.has_language_model
        async with openai.AsyncOpenAI(
            base_url=f"{deployment.gateway_url}/v1", api_key="-", http_client=http_client()
        ) as client:
            for question, answer, *pictures in (
                ("What color is the circle?", "red", PICTURE),
                ("Where is the blue square?", "right", PICTURE),
                ("How many shapes are there?", "3", PICTURE),
                ("What is the capital of France?", "Paris"),
            ):
                reply = await client.chat.completions.create(**chat(question, *pictures))
                assert reply.choices[0].message.content == answer
        rss = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        assert rss < 3 * GIB or len(pids) > 4
        await Books.of(deployment).check()
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 30
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    wait_until(lambda: not left_behind(before), "no shared memory is left")
    check_stages(tmp_path, config.topology.num_instances)


def check_stages(traces: Path, num_instances: int) -> None:
    """Every process has written its part, and the stages of each request make up its time at the gateway."""
    assert all(json.loads(path.read_text()) for path in traces.iterdir()), "complete JSON after an orderly end"
    assert len(list(traces.iterdir())) == num_instances + 1
    requests = read_traces(traces).requests
    assert [request.stages["encode_execute"] > 0 for request in requests] == [True, False, False, False], (
        "then kept"
    )
    assert all(request.stages["prefill_execute"] > 0 for request in requests)
