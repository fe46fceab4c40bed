"""A running deployment becomes another one: nobody notices, and what goes wrong leaves one that serves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from http_client import http_client
from program import until

from benchmarks import apply_ring, chaos
from epd_serve.config import DeploymentConfig, change_config, parse_config
from epd_serve.config.keys import hash_key
from epd_serve.launch.apply import ApplyStopped
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.supervisor import Backoff

PORTS = "gateway: {port: 0}\ninstances: {base_port: 0}\n"
BODY = {"model": "demo", "prompt": "Count to 9.", "max_tokens": 16, "temperature": 0}


def topology(line: str, more: str = "") -> DeploymentConfig:
    return parse_config(f"topology: {line}\n{PORTS}{more}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[LocalDeployment]:
    """One deployment that all tests change, in their order."""
    backoff = Backoff(first_s=0.1, limit_s=0.1)
    async with LocalDeployment(topology("E-P-D"), ready_timeout_s=300, backoff=backoff) as deployment:
        yield deployment


async def serves(deployment: LocalDeployment) -> bool:
    try:
        async with http_client() as client:
            answer = await client.post(f"{deployment.gateway_url}/v1/completions", json=BODY)
    except httpx.TransportError:  # the gateway was killed
        return False
    return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])


def roles(deployment: LocalDeployment) -> list[str]:
    return sorted(str(one.role) for one in deployment.instances.values())


def kill(deployment: LocalDeployment, name: str) -> None:
    [process] = [one for one in deployment.processes if one.spec.name == name]
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_no_request_notices_a_ring_of_topologies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "ring.json"
    ring = ["cpu-e-p-d", "cpu-e_p-d", "cpu-ed-p", "cpu-epd", "cpu-2e-p-d"]
    options = ["--direct", "--requests", "12", "--concurrency", "4", "--laps", "1", "--answers", "4"]
    options += ["--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["apply_ring", *options, "--ring", *ring])
    monkeypatch.setattr(chaos, "DEADLINE_S", 300.0)  # an answer may take long, and has to come
    code = apply_ring.main()
    report = json.loads(output.read_text())
    assert code == 0 and report["passed"], json.dumps(report, indent=2)
    assert set(report["steps"]) == {"start", "switch", "stop"}
    roles = [" ".join(sorted(one["instances"].values())) for one in report["applies"]]
    assert roles == ["D E P", "ED P", "EPD", "D E E P", "D E P"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failed_start_changes_nothing_and_the_next_file_is_taken(deployment: LocalDeployment) -> None:
    with pytest.raises(ApplyStopped) as stopped:
        await deployment.apply(topology("E-2P-D", "roles: {P: {kv_cache_bytes: 3000000000000000000}}"))
    assert "died: exit code" in str(stopped.value)
    assert "keeps serving with e0 (E), p0 (P), d0 (D)" in str(stopped.value)
    assert roles(deployment) == ["D", "E", "P"] and await serves(deployment)
    assert "3000000000000000000" not in (deployment.admin_socket.parent / "roles.json").read_text()
    first, second = await asyncio.gather(
        deployment.apply(topology("E-2P-D")), deployment.apply(topology("EPD")), return_exceptions=True
    )
    assert first is None
    assert isinstance(second, ValueError) and "another apply is running" in str(second)
    assert roles(deployment) == ["D", "E", "P", "P"] and await serves(deployment)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_says_its_steps_and_what_is_wrong(deployment: LocalDeployment, tmp_path: Path) -> None:
    async def run(*arguments: str) -> tuple[int | None, str]:
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        command = (sys.executable, "-m", "epd_serve.cli", *arguments)
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    async def apply(text: str, *options: str) -> tuple[int | None, str]:
        (tmp_path / "new.yaml").write_text(text)
        return await run("apply", str(tmp_path / "new.yaml"), *options)

    code, said = await run("status")
    assert code == 0 and said.count(" ready ") == 4, said
    assert await apply(f"topology: 2E-2P-D\n{PORTS}", "--dry-run") == (
        0,
        'topology: "E-2P-D" -> "2E-2P-D"\nstart e1 (E)\n',
    )
    assert set(deployment.instances) == {"e0", "p0", "p1", "d0"}
    code, said = await apply(f"topology: EP-P-D\n{PORTS}")
    assert code == 0 and "step 1 of 2: switch e0 from E to EP\nstep 2 of 2: stop p1 (P)\n" in said
    assert roles(deployment) == ["D", "EP", "P"] and await serves(deployment)
    for text, message in (
        ("topology: E-P\n", "new.yaml:1: topology"),
        (f"feature_store: mooncake\n{PORTS}", "a change of feature_store needs a restart"),
    ):
        code, said = await apply(text)
        assert code == 2 and message in said and "Traceback" not in said, said
    assert roles(deployment) == ["D", "EP", "P"]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_options_of_the_gateway_bring_another_one_and_cut_no_stream(deployment: LocalDeployment) -> None:
    await deployment.apply(topology("E-P-D"))
    url = f"{deployment.gateway_url}/v1/completions"
    body = BODY | {"prompt": "Count to 99.", "max_tokens": 600, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_keepalive_connections=4)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.timeout(240):
        assert (await client.post(url, json=BODY)).status_code == 200  # its connection stays open
        async with client.stream("POST", url, json=body) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            before = {process.pid for process in deployment.processes}
            lines_said: list[str] = []
            keys = [{"name": "alice", "hash": hash_key("secret")}]
            changed = change_config(deployment.config, {"gateway": {"max_body_bytes": 2000, "api_keys": keys}})
            asking = asyncio.create_task(_ask_until_refused(client, url))
            await deployment.apply(changed, lines_said.append)
            assert lines_said == [
                "gateway.max_body_bytes: 67108864 -> 2000",
                "gateway.api_keys: none -> alice",
                "replace gateway",
            ]
            key = {"authorization": "Bearer secret", "content-type": "application/json"}
            async with httpx.AsyncClient(timeout=60, headers=key) as other:
                while (await other.post(url, content=b"x" * 3000)).status_code != 413:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await asking == {200}, "none was lost until the other gateway asked for the key"
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]", "the old gateway has finished its stream"
        assert len(before & {process.pid for process in deployment.processes}) == 3, "the instances stayed"
        with pytest.raises(ValueError, match="needs a restart"):
            await deployment.apply(change_config(deployment.config, {"dtype": "bfloat16"}))
        lines_said.clear()
        await deployment.apply(topology("E-P-D"), lines_said.append)
        assert any("THE API BECOMES OPEN" in line for line in lines_said)
    assert await serves(deployment)


async def _ask_until_refused(client: httpx.AsyncClient, url: str) -> set[int]:
    """Statuses of requests, one after the other on connections that are kept, before the first 401."""
    statuses = set()
    while (status := (await client.post(url, json=BODY)).status_code) != 401:
        statuses.add(status)
    return statuses


def at(words: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Once, when such a step begins."""
    left = [act]

    def tell(text: str) -> None:
        if words in text and left:
            left.pop()()

    return tell


async def test_the_autoscaler_starts_again_with_the_new_topology() -> None:
    more = "slo: {ttft_ms: 2000, tpot_ms: 200}\nelastic: {}\n"
    async with LocalDeployment(topology("EPD", more), ready_timeout_s=300) as deployment:
        before = deployment.process("autoscale").pid
        await deployment.apply(topology("E-PD", more))
        assert deployment.process("autoscale").pid != before
        file = json.loads((deployment.admin_socket.parent / "deployment.yaml").read_text())
        assert file["topology"] == "E-PD" and roles(deployment) == ["E", "PD"]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_processes_that_die_meanwhile(deployment: LocalDeployment) -> None:
    await deployment.apply(topology("E-P-D"))
    await deployment.apply(topology("2E-P-D"), at("start e1", lambda: kill(deployment, "p0")))
    assert roles(deployment) == ["D", "E", "E", "P"]
    await until(lambda: serves(deployment))  # once what was killed has started again
    await deployment.apply(topology("E-P-2D"), at("switch", lambda: kill(deployment, "gateway")))
    assert roles(deployment) == ["D", "D", "E", "P"]
    await until(lambda: serves(deployment))  # once what was killed has started again
    [switched] = [name for name, one in deployment.instances.items() if name[0] == "e" and str(one.role) == "D"]
    kill(deployment, switched)
    [process] = [one for one in deployment.processes if one.spec.name == switched]
    await until(lambda: process.num_restarts > 0 and process.ready.is_set())
    async with http_client() as client:
        info = (await client.get(f"{process.spec.url}/info")).json()
    assert info["role"] == "D", "what is started again has the role that it was switched to"
    assert info["num_restarts"] == process.num_restarts

    async def kill_when_there() -> None:
        await until(lambda: any(one.spec.name == "p1" and one.is_running for one in deployment.processes))
        kill(deployment, "p1")

    killing = asyncio.create_task(kill_when_there())
    with pytest.raises(ApplyStopped, match="killed by SIGKILL"):
        await deployment.apply(topology("E-2P-2D"))
    await killing
    await until(lambda: serves(deployment))
    await deployment.apply(topology("E-2P-2D"))
    assert roles(deployment) == ["D", "D", "E", "P", "P"]
    await until(lambda: serves(deployment))  # once what was killed has started again
