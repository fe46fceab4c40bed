"""The pods of rendered manifests, each on a host of its own."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat import chat
from pictures import noise

from epd_serve.launch.remote.kubernetes import Values, manifests

FILE = Path(__file__).parents[2] / "deploy" / "cpu-e_p-d.yaml"


@pytest.mark.slow
async def test_agents_run_what_was_rendered(
    fleet: Callable[..., Any], tmp_path: Path, long_text: dict[str, Any]
) -> None:
    docs = manifests(FILE, Values())
    file = tmp_path / "deployment.yaml"
    file.write_text(docs[0]["data"]["deployment.yaml"])
    pods = [one["spec"]["template"]["spec"]["containers"][0] for one in docs if one["kind"] == "Deployment"]
    agents = [[word.replace("/etc/epd-serve", str(tmp_path)) for word in one["command"]] for one in pods[1:]]
    async with fleet(spares=("pair", "d")) as running:
        pair = await running.start_agent("pair", agents[0])
        d = await running.start_agent("d", agents[1])
        await running.ready("pair-e0", "pair-p0", "d")
        assert set(await running.instances()) == {"pair-e0", "pair-p0", "d"}
        assert (
            _status(running.hosts["pair"], "/health/ready") == _status(running.hosts["d"], "/health/live") == 200
        )
        assert _status(running.hosts["d"], "/elsewhere") == 404
        assert (await running.ask(chat("What is it?", noise(1, (96, 72)), max_tokens=4)))[0] == 200
        began = asyncio.Event()
        answer = asyncio.create_task(running.stream(long_text, began))
        await began.wait()
        running.hosts["d"].terminate(d)
        assert (await answer).text, "it finishes what it has"
        assert await asyncio.wait_for(d.wait(), 40) == 0
        assert set(await running.instances()) == {"pair-e0", "pair-p0"}, "it has said that it leaves"
        await running.start_agent("d", agents[1])
        await running.ready("d")
        assert (await running.ask(chat("Count to 5", max_tokens=12)))[0] == 200
        running.hosts["pair"].terminate(pair)
        assert await asyncio.wait_for(pair.wait(), 40) == 0


@pytest.mark.slow
async def test_agents_follow_one_file(fleet: Callable[..., Any]) -> None:
    deployment = {
        "topology": "(E-P)-2D",
        "hosts": {"n1": {"address": "10.77.0.2"}, "n2": {"address": "10.77.0.3"}},
        "devices": ["n1/cpu", "n1/cpu", "n2/cpu"],
        "instances": {"base_port": 8100},
    }
    async with fleet(spares=("n1", "n2"), deployment=deployment) as running:
        for name in ("n1", "n2"):
            await running.start_host(name)
        await running.ready("n1-e0", "n1-p0", "n1-d0", "n2-d0")
        picture = chat("What is it?", noise(1, (96, 72)), max_tokens=4)
        first = await running.ask(picture)
        assert first[0] == 200
        asking, over = [], asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                asking.append(await running.ask(picture))

        load = asyncio.create_task(ask())
        assert "n1: D E P -> E 2P" in (said := await running.command("apply", "--topology", "(E-P)-P-D")), said
        assert {name: one["role"] for name, one in (await running.instances()).items()} == {
            "n1-e0": "E",
            "n1-p0": "P",
            "n1-d0": "P",
            "n2-d0": "D",
        }
        assert "this host is as the gateway's file has it" in await running.command("logs", "n1-agent")
        assert "n2-d0 on n2" in await running.command("logs")
        said = await running.command("apply", "--topology", "(E-P)-2D")
        over.set()
        await load
        assert {answer[:2] for answer in asking} == {first[:2]}, "nobody noticed"
        running.hosts.power_off("n2")
        assert [(await running.ask(picture))[:2] for _ in range(4)] == [first[:2]] * 4, "one D is left"


def _status(host: Any, path: str) -> int:
    def ask() -> int:
        try:
            with urllib.request.urlopen(f"http://{host.ip}:8099{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return int(host.run(ask))
