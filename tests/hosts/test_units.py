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
async def test_units_run_what_was_rendered(
    fleet: Callable[..., Any], tmp_path: Path, long_text: dict[str, Any]
) -> None:
    docs = manifests(FILE, Values())
    file = tmp_path / "deployment.yaml"
    file.write_text(docs[0]["data"]["deployment.yaml"])
    pods = [one["spec"]["template"]["spec"]["containers"][0] for one in docs if one["kind"] == "Deployment"]
    units = [[word.replace("/etc/epd-serve", str(tmp_path)) for word in one["command"]] for one in pods[1:]]
    async with fleet(spares=("pair", "d")) as running:
        pair = await running.start_unit("pair", units[0])
        d = await running.start_unit("d", units[1])
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
        await running.start_unit("d", units[1])
        await running.ready("d")
        assert (await running.ask(chat("Count to 5", max_tokens=12)))[0] == 200
        running.hosts["pair"].terminate(pair)
        assert await asyncio.wait_for(pair.wait(), 40) == 0


def _status(host: Any, path: str) -> int:
    def ask() -> int:
        try:
            with urllib.request.urlopen(f"http://{host.ip}:8099{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return int(host.run(ask))
