"""Deployments of a model that computes nothing: real in all else, so that tokens judge schedules and transfers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat import chat, data_url, stream_events
from fleet import deployed, figures
from in_process import Deployment, deployment
from own_ports import free_port
from pictures import png
from PIL import Image
from program import wait_until

from device.datasheets import emulated_sheet
from device.emulated.timeline import EMULATED_FAULTS
from epd_serve.config import DeploymentConfig, ShapeConfig
from epd_serve.cost.shape import shape_of
from epd_serve.engine.emulated.digests import DigestMemory
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.process import ProcessState
from epd_serve.launch.processes.supervisor import Process
from epd_serve.routing import encoders

SHAPE = ShapeConfig(shape_of="qwen2.5-vl-7b")
OPTIONS: dict[str, Any] = {"dtype": "auto", "device": "emulated:h200:0", "num_blocks": 2048, "max_model_len": 8192}


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (90 + 50 * number, 140), (number * 40 % 256, 80, 10))


def question(number: int, **fields: Any) -> dict[str, Any]:
    """Text or pictures, greedy or drawn, one choice or two, with and without an end of its own."""
    images = [picture(number % 5), picture(number // 2)][: number % 3]
    more = {"n": 2} if number % 4 == 0 else {"stop": ["ba", "Q"]} if number % 4 == 1 else {"ignore_eos": True}
    return chat(
        f"question {number} " + "of many words, " * (7 * number),
        *images,
        model="demo",
        max_tokens=12 + number,
        temperature=0 if number % 2 else 0.8,
        seed=number,
        **more,
        **fields,
    )


async def asked(url: str, session: aiohttp.ClientSession, number: int) -> list[str]:
    """The choices of an answer, streamed for some questions of one choice: a stream of several does not go on."""
    body = question(number, stream=number % 5 < 2 and number % 4 > 0)
    choices = ["", ""]
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        if not body["stream"]:
            for choice in (await answer.json())["choices"]:
                choices[choice["index"]] = choice["message"]["content"]
            return choices
        for event in stream_events(await answer.text()):
            for choice in event["choices"]:
                choices[choice["index"]] += choice["delta"].get("content") or ""
    return choices


async def answers(url: str, session: aiohttp.ClientSession) -> list[list[str]]:
    found = await asyncio.gather(*(asked(url, session, number) for number in range(12)))
    assert all(text.isprintable() and text.isascii() for choices in found for text in choices)
    assert all(choices[0] for number, choices in enumerate(found) if number % 4 != 1)
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    async def find() -> list[list[str]]:
        async with deployment(SHAPE, "EPD", options=OPTIONS) as one:
            found = await answers(one.url, one.session)
            await one.settle()
            return found

    found = asyncio.run(find())
    assert len({choices[0] for choices in found}) == 12
    return found


@pytest.fixture
async def parts() -> AsyncIterator[Deployment]:
    async with deployment(SHAPE, "E", "P", "D", options=OPTIONS, restart="never") as one:
        yield one


def memory(one: Deployment, name: str) -> DigestMemory:
    weights = one.instances[name].weights
    assert weights is not None
    found = weights.memory
    assert isinstance(found, DigestMemory)
    return found


@pytest.mark.parametrize("roles", ["EP-D", "E-P-D", "ED-P"])
async def test_tokens_are_the_same_in_every_topology(roles: str, expected: list[list[str]]) -> None:
    # four layers × blocks at once, where a prompt has hundreds
    small = {"staging_bytes": 2**20}
    async with deployment(SHAPE, *roles.split("-"), options=OPTIONS | small) as one:
        assert await answers(one.url, one.session) == expected
        await one.settle()


async def test_tokens_are_the_same_however_many_encoders_share_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated features are made of the segments' names; tokens are not, nor are the names of prefixes."""
    monkeypatch.setattr(encoders, "_CALL_S", float("-inf"))
    frames = ",".join(data_url(png(picture(number))).partition(",")[2] for number in [1] * 9)
    video = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    body = chat("What happens?", model="demo", max_tokens=20, ignore_eos=True)
    body["messages"][0]["content"] = [video, {"type": "text", "text": "What happens?"}]
    found: list[Any] = []
    for count in (1, 2, 3):
        async with deployment(SHAPE, *["E"] * count, "P", "D", options=OPTIONS) as one:
            for number in range(2):
                status, answer = await one.post("/v1/chat/completions", body)
                assert status == 200, answer
                found.append((answer["choices"][0]["message"], answer["usage"]["prompt_tokens"]))
                hits = (await figures(one.instances[f"p{count}"].url))["prefix_cache_hits_total"]
                assert (hits > 0) is (number > 0)
            made = [(await figures(one.instances[f"e{i}"].url))["tower_images_total"] for i in range(count)]
            assert made == [1] * count
            await one.settle()
    assert found == [found[0]] * 6


async def refusal(one: Deployment, number: int) -> str:
    """The error that a question gets."""
    status, body = await one.post("/v1/chat/completions", question(number))
    assert status == 500, body
    return str(body["error"]["message"])


async def test_kv_that_goes_bad_gives_no_answer_but_a_named_error(parts: Deployment) -> None:
    """A block is overwritten in one layer, at D after its transfer. No later request finds it."""
    kept = memory(parts, "d2")
    land = kept.land

    @contextmanager
    def harm(layers: range, parts: Any) -> Iterator[Any]:
        with land(layers, parts) as landing:
            yield landing
        if 3 in layers:
            kept.write(parts[0][0], bytes(kept.block_bytes), range(3, 4))

    kept.land = harm  # type: ignore[method-assign]
    assert "does not match its tokens" in await refusal(parts, 7)
    kept.land = land  # type: ignore[method-assign]
    assert await asked(parts.url, parts.session, 7)
    await parts.settle()


async def test_features_of_other_pictures_are_noticed(parts: Deployment) -> None:
    model: Any = parts.instances["e0"].encoder.model
    model.data_of = lambda feature: memoryview(bytes(len(feature.data)))
    assert "does not match its image" in await refusal(parts, 4)


async def test_processes_that_die_and_change_roles(
    expected: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances go on where others ended. One whose device is lost ends, says why, and is started again."""
    faults = tmp_path / "faults.json"
    monkeypatch.setenv(EMULATED_FAULTS, str(faults))
    admin_port = free_port("127.0.0.1")
    async with (
        deployed(
            "(E-P)-2D",
            SHAPE,
            gateway={"admin": {"port": admin_port}},
            instances={"kv_cache_bytes": "1792MiB", "max_model_len": 8192},
            served_model_name="demo",
            devices=["emulated:h200 x 3"],
            backoff_s=0.1,
        ) as one,
        aiohttp.ClientSession() as session,
    ):
        assert await answers(one.gateway_url, session) == expected
        asking = asyncio.create_task(answers(one.gateway_url, session))
        await asyncio.sleep(0.3)
        os.kill(one.instances["d0"].pid, signal.SIGKILL)
        assert await asking == expected

        before = one.instances["d1"].pid
        asking = asyncio.create_task(answers(one.gateway_url, session))
        await asyncio.sleep(0.3)
        faults.write_text('{"emulated:h200:2": {"lost": true}}')
        assert await asking == expected
        (process,) = (process for process in one.processes if process.spec.name == "d1")
        async with asyncio.timeout(30):
            while process.state == "ready":  # an idle instance learns of it at its next step
                assert await answers(one.gateway_url, session) == expected
        faults.unlink()
        await asyncio.to_thread(wait_until, lambda: process.state == "ready", "it is up again", 60)
        assert one.instances["d1"].pid != before
        said = process.log_file.read_text()
        assert "emulated:h200:2 is lost" in said and "this process ends" in said

        admin = f"http://127.0.0.1:{admin_port}"
        asking = asyncio.create_task(answers(one.gateway_url, session))
        await asyncio.sleep(0.2)
        status = 0
        while status != 200:  # d0 is started again
            async with session.post(f"{admin}/instances/d1/role", json={"role": "P", "patience_s": 0}) as answer:
                status = answer.status
                assert status in (200, 409), await answer.text()
        assert await asking == expected
        assert await answers(one.gateway_url, session) == expected


async def test_instances_on_one_device_start_side_by_side_each_in_its_part_of_the_memory() -> None:
    states: list[tuple[str, ProcessState]] = []
    ports = {"gateway": {"port": 0}, "instances": {"base_port": 0}}
    config = DeploymentConfig(topology="(E-P-D)", devices=["emulated:h200:0"], model=SHAPE, **ports)

    class Watched(LocalDeployment):
        def on_change(self, process: Process) -> None:
            states.append((process.spec.name, process.state))

    async with Watched(config) as one:
        kv = {name: (await figures(one.instances[name].url))["total_blocks"] for name in ("p0", "d0")}
    ready = next(number for number, (_, state) in enumerate(states) if state is ProcessState.READY)
    assert {name for name, _ in states[:ready]} == {"e0", "p0", "d0", "gateway"}
    shape = shape_of(SHAPE.shape_of)
    memory, weights = emulated_sheet("h200").memory_bytes, 2 * shape.language.parameters
    assert kv["p0"] == kv["d0"]
    assert 0.2 * memory < kv["p0"] * 16 * shape.kv_token_bytes < 0.409 * memory - weights
