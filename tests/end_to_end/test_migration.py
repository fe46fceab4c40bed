"""Decode instances that leave while they decode: clients see nothing of it, whoever dies in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Books
from in_process import Deployment, deployment
from services import language_of
from tiny_models import make_tiny_model

from benchmarks.ablations.processes import ablated
from device.base import Event
from epd_serve.config import DeploymentConfig
from epd_serve.demo import weights_dir
from epd_serve.instance.http import Reply
from epd_serve.instance.language_engine import LanguageEngine
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import free_port
from epd_serve.launch.processes.supervisor import Backoff
from epd_serve.protocol import instance_state, wire
from epd_serve.transfer.kv_sender import Part
from epd_serve.transfer.shared_memory import is_being_written

PROMPTS = ("The red circle is", "apple banana cherry", "Where is it?", "one two three")


#: 600 tokens, each with 2 KiB of KV, and a link on which they take most of a second.
LONG = "apple " * 200
NUM_BLOCKS = 256


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}


def colours(seed: int) -> dict[str, Any]:
    """A list that is as long as its schema says, whatever the model would say."""
    schema = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 60, "maxItems": 60}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": "Which colours?"}],
        "seed": seed,
        "max_tokens": 600,
        "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": schema}},
    }


def outcomes(metrics: str) -> dict[str, float]:
    """How often KV was moved, and how often it was not."""
    head = 'epd_serve_migrations_total{outcome="'
    lines = [line.removeprefix(head) for line in metrics.splitlines() if line.startswith(head)]
    return {line.split('"')[0]: float(line.split()[-1]) for line in lines}


def text_of(answer: str) -> str:
    """The text of an answer in one piece, or of all events."""
    pieces = [answer]
    if not answer.startswith("{"):
        assert answer.endswith("data: [DONE]\n\n"), answer[-300:]
        pieces = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    text = ""
    for piece in pieces:
        choice = json.loads(piece)["choices"][0]
        text += choice["text"] if "text" in choice else (choice.get("delta") or choice["message"])["content"]
    return text


async def ask(here: Deployment, question: dict[str, Any], *, stream: bool) -> str:
    path = "/v1/completions" if "prompt" in question else "/v1/chat/completions"
    async with here.session.post(here.url + path, json=question | {"stream": stream}) as answer:
        assert answer.status == 200, await answer.text()
        return text_of(await answer.text())


async def counted(here: Deployment) -> dict[str, float]:
    async with here.session.get(f"{here.url}/metrics") as metrics:
        return outcomes(await metrics.text())


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        pytest.param("demo", [body(prompt, 300) for prompt in PROMPTS], id="plain"),
        pytest.param("demo", [colours(1), colours(2)], id="json_schema"),
        pytest.param(
            "qwen3_5", [body(prompt, 120) for prompt in PROMPTS[:2]], id="states", marks=pytest.mark.slow
        ),
    ],
)
async def test_streams_and_whole_answers_move_with_their_kv(
    kind: str, questions: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = weights_dir() if kind == "demo" else make_tiny_model(kind, tmp_path / "model")
    async with deployment(model, "P", "D", "D") as here, asyncio.timeout(400):
        texts = [await ask(here, question, stream=True) for question in questions]
        assert "prompt" in questions[0] or len(json.loads(texts[0])) == 60
        mover, moved = here.instances["d1"], 0.0
        while not moved:  # an answer may have come to its end before
            asked = [
                (text, asyncio.create_task(ask(here, question, stream=stream)))
                for question, text in zip(questions, texts, strict=True)
                for stream in (True, False)
            ]
            while not mover.in_use()["sequences"] and not all(answer.done() for _, answer in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await mover.lifecycle.switch(instance_state.RoleOrder(role="P", patience_s=0))
            assert not any(mover.in_use().values())
            for text, answer in asked:
                assert await answer == text
            moved = (await counted(here))["moved"]
            await mover.lifecycle.switch(instance_state.RoleOrder(role="D"))
        await here.settle()


async def test_kv_that_cannot_go_speaks_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker that the first failure opens stays closed, and the answer goes on."""
    health = {"probe_interval_s": None, "max_failures": 1}
    async with deployment(weights_dir(), "P", "D", "D", health=health) as here, asyncio.timeout(400):
        question = body(PROMPTS[0], 300)
        text = await ask(here, question, stream=True)
        source = language_of(here.instances["d1"])

        def write_nothing(layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
            for part in parts:
                part.transfer.cancelled = True

        monkeypatch.setattr(source.sender, "push", write_nothing)
        for stream in (True, False):
            before = await counted(here)
            while await counted(here) == before:  # an answer may have come to its end before
                asked = [asyncio.create_task(ask(here, question, stream=stream)) for _ in range(2)]
                while not source.engine.queues.num_running and not all(one.done() for one in asked):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                source.send_away(begun=True, late=False)
                assert await asyncio.gather(*asked) == [text, text]
        for name in here.instances:
            assert here.app.state.health.describe(name)["breaker"] == "closed"
        await here.settle(60)


async def test_a_first_token_that_is_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """P's answer is still on its way when D, which has all of the KV, breaks off behind the token in it."""
    async with deployment(weights_dir(), "P", "D", "D") as here, asyncio.timeout(400):
        text = await ask(here, body(PROMPTS[0], 20), stream=True)
        prefills, is_left = here.instances["p0"].language.prefill, False
        languages = [language_of(here.instances[name]) for name in ("d1", "d2")]
        prefill = prefills.prefill

        async def prefill_and_hang(request: wire.PrefillRequest) -> Reply:
            reply = await prefill(request)
            if is_left:
                return reply
            assert reply.stream is not None and reply.on_close is not None
            while not any(language.load().num_expected for language in languages):  # noqa: ASYNC110
                await asyncio.sleep(0)
            try:
                assert [piece async for piece in reply.stream]
                await asyncio.Event().wait()  # until the gateway has given up this attempt
            finally:
                reply.on_close()
            raise AssertionError("it waits for ever")

        def leave_behind(language: LanguageEngine) -> None:
            complete = language.decode.complete

            async def complete_and_leave(handoff: wire.Handoff) -> None:
                nonlocal is_left
                with language.engine._changed:  # no step begins
                    await complete(handoff)
                    if not is_left:
                        is_left = True
                        language.send_away(begun=True, late=False)

            monkeypatch.setattr(language.decode, "complete", complete_and_leave)

        monkeypatch.setattr(prefills, "prefill", prefill_and_hang)
        for language in languages:
            leave_behind(language)
        assert await ask(here, body(PROMPTS[0], 20), stream=True) == text
        assert is_left and await counted(here) == {"moved": 0.0, "fallen_back": 1.0}
        await here.settle(60)


def is_written_to(pid: int) -> bool:
    """Whether somebody is in the middle of writing into a process's KV memory."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.readlink().name.startswith("memfd:kv-"):
                file = os.open(path, os.O_RDWR)
                try:
                    region = wire.Region("", 0, "", pid, file, "", 0)
                    return any(is_being_written(region, slot) for slot in range(NUM_BLOCKS))
                finally:
                    os.close(file)
    raise AssertionError(f"{pid} has no KV memory")


def has_stopped(pid: int) -> bool:
    """Whether none of its threads runs, after SIGSTOP."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)


class Site:
    """P and two D, one of which is to leave."""

    def __init__(self, deployment: LocalDeployment, admin: str, client: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.admin = admin
        self.client = client

    async def ask(self, prompt: str) -> str:
        asked = body(prompt, 400 if prompt == LONG else 1500) | {"stream": True}
        answer = await self.client.post(f"{self.deployment.gateway_url}/v1/completions", json=asked)
        return text_of(answer.text)

    async def held(self, name: str) -> dict[str, int]:
        url = self.deployment.instances[name].url
        held: dict[str, int] = (await self.client.get(f"{url}/integrity")).json()
        return held

    def pid(self, name: str) -> int:
        return self.deployment.instances[name].pid

    def kill(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    async def counted(self) -> dict[str, float]:
        return outcomes((await self.client.get(f"{self.deployment.gateway_url}/metrics")).text)

    async def decoding(self, answer: asyncio.Task[str]) -> tuple[str, str] | None:
        """The D that decodes, and the other; None where the answer has come to its end before."""
        while not answer.done():
            for name, other in (("d0", "d1"), ("d1", "d0")):
                if (await self.held(name))["sequences"]:
                    return name, other
            await asyncio.sleep(0.01)
        return None

    async def order(self, name: str, role: str) -> int:
        wanted = {"role": role, "deadline_s": 60, "patience_s": 0}
        return (await self.client.post(f"{self.admin}/instances/{name}/role", json=wanted)).status_code

    async def begin(self, answer: asyncio.Task[str]) -> tuple[str, str, asyncio.Task[int]] | None:
        """The D whose answer is broken off, with its KV there, the other, which is stopped, so that nothing gets
        there, and the order to the first; None where the answer has come to its end before."""
        if (found := await self.decoding(answer)) is None:
            return None
        source, target = found
        self.kill(target, signal.SIGSTOP)
        ordered = asyncio.create_task(self.order(source, "P"))
        while not answer.done():
            held = await self.held(source)
            if held["blocks"] and not held["sequences"] and not held["timeline"]:
                return source, target, ordered
            await asyncio.sleep(0.002)
        self.kill(target, signal.SIGCONT)
        await self.back(source, ordered)
        return None

    async def begin_writing(self, answer: asyncio.Task[str]) -> tuple[str, str, asyncio.Task[int]] | None:
        """The same with the first stopped in the middle of its write into the memory of the other, which runs."""
        if (found := await self.decoding(answer)) is None:
            return None
        source, target = found
        ordered = asyncio.create_task(self.order(source, "P"))
        while not answer.done():
            if is_written_to(self.pid(target)):
                self.kill(source, signal.SIGSTOP)
                while not has_stopped(self.pid(source)):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                if is_written_to(self.pid(target)):
                    return source, target, ordered
                self.kill(source, signal.SIGCONT)
            await asyncio.sleep(0.002)
        await self.back(source, ordered)
        return None

    async def back(self, source: str, ordered: asyncio.Task[int]) -> None:
        await ordered
        await self.ready()
        assert await self.order(source, "D") == 200

    async def ready(self) -> None:
        await self.deployment.wait_ready()
        while True:
            answer = await self.client.get(f"{self.admin}/admin/instances")
            if all(one["ready"] and not one["draining"] for one in answer.json()["instances"]):
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def site(bandwidth: int | None = None, **instances: Any) -> AsyncIterator[Site]:
    port = free_port("127.0.0.1")
    config = DeploymentConfig.model_validate(
        {
            "topology": "P-2D",
            "gateway": {
                "port": 0,
                "admin": {"port": port},
                "failover": {"wait_s": 60},
                "health": {"probe_interval_s": None},
            },
            "instances": {"base_port": 0, "threads": 1, "num_blocks": NUM_BLOCKS, **instances},
        }
    )
    with ablated(bandwidth=bandwidth):
        deployment = LocalDeployment(
            config, ready_timeout_s=300, backoff=lambda: Backoff(first_s=0.05, limit_s=0.05)
        )
    async with deployment, httpx.AsyncClient(timeout=150, trust_env=False) as client:
        yield Site(deployment, f"http://127.0.0.1:{port}", client)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "is_written",
    [pytest.param(False, id="before_the_write", marks=pytest.mark.slow), pytest.param(True, id="in_the_write")],
)
async def test_whoever_dies_in_the_middle_the_answer_goes_on(*, is_written: bool) -> None:
    settings: dict[str, Any] = {"bandwidth": 1_500_000, "lease_s": 5} if is_written else {}
    prompt = LONG if is_written else PROMPTS[0]
    async with site(**settings) as here, asyncio.timeout(500):
        text = await here.ask(prompt)
        for victim in ("source", "target"):
            while True:
                await here.ready()
                before = await here.counted()
                answer = asyncio.create_task(here.ask(prompt))
                begun = await (here.begin_writing(answer) if is_written else here.begin(answer))
                if begun is not None:
                    break
                assert await answer == text
            source, target, ordered = begun
            dead, stopped = source if victim == "source" else target, source if is_written else target
            here.kill(dead, signal.SIGKILL)
            if stopped != dead:
                here.kill(stopped, signal.SIGCONT)
            assert await answer == text
            assert await here.counted() == before | {"fallen_back": before["fallen_back"] + 1}
            assert (await ordered == 200) == (victim == "target")
            if victim == "target":
                assert await here.order(source, "D") == 200
        await here.ready()
        await Books({name: one.url for name, one in here.deployment.instances.items()}).check()
