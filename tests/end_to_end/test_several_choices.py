"""A stream of several choices whose decode instance dies: its client gets what it would have got without that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import httpx
from chat import chat
from fleet import Books
from http_client import http_client

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import free_port

#: Tokens of each choice.
LENGTH = 120


@dataclass
class Answer:
    """Text and finish reason of each choice."""

    texts: list[str]
    ends: list[str | None]
    usage: Any = None


async def stream(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> Answer:
    """``begun`` is set once there is text of each choice that goes on, and one has ended where there is a stop."""
    answer = Answer([""] * body["n"], [None] * body["n"])
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.removeprefix("data: [DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                number = choice["index"]
                assert answer.ends[number] is None, "nothing comes behind the end of a choice"
                answer.texts[number] += choice["delta"]["content"]
                answer.ends[number] = choice["finish_reason"]
            going_on = [text for text, end in zip(answer.texts, answer.ends, strict=True) if end is None]
            if all(len(text) > 5 for text in going_on) and ("stop" not in body or len(going_on) < body["n"]):
                begun.set()
    return answer


def only_in_first(texts: list[str]) -> str:
    """A piece of its beginning that no other has."""
    first, *others = texts
    pieces = (first[at : at + 4] for at in range(10, len(first)))
    return next(piece for piece in pieces if not any(piece in other for other in others))


async def test_each_choice_goes_on_at_another_decode_instance() -> None:
    admin = free_port("127.0.0.1")
    gateway = {"port": 0, "admin": {"port": admin}}
    config = DeploymentConfig(
        topology="P-3D", restart="never", gateway=gateway, instances={"base_port": 0, "threads": 1}
    )
    async with (
        LocalDeployment(config, ready_timeout_s=300) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        urls = {name: handle.url for name, handle in deployment.instances.items()}

        def signal_all(number: signal.Signals) -> None:
            for name in urls:
                if name != "p0":
                    os.kill(deployment.instances[name].pid, number)

        for number, temperature in enumerate((0.0, 1.2), start=1):
            body = chat("Count to 9.", max_tokens=LENGTH, ignore_eos=True, stream=True, temperature=temperature)
            body |= {"n": 3, "seed": 7, "stream_options": {"include_usage": True}}
            whole = await stream(client, body, asyncio.Event())
            assert whole.ends == ["length"] * 3 and whole.usage["completion_tokens"] == 3 * LENGTH
            if temperature:
                body["stop"] = only_in_first(whole.texts)
                going_on, whole = whole, await stream(client, body, asyncio.Event())
                assert whole.ends == ["stop", "length", "length"] and whole.texts[1:] == going_on.texts[1:]
                assert 2 * LENGTH < whole.usage["completion_tokens"] < 3 * LENGTH
            await Books(urls).check()
            for _ in range(10):  # where this process is held up, the answer is there when it looks
                begun = asyncio.Event()
                asked = asyncio.create_task(stream(client, body, begun))
                await begun.wait()
                signal_all(signal.SIGSTOP)  # so that it does not end while it is looked for
                known = (await client.get(f"http://127.0.0.1:{admin}/instances")).json()["instances"]
                if found := [one["name"] for one in known if "D" in one["in_flight"]]:
                    break
                signal_all(signal.SIGCONT)
                assert await asked == whole
            [busy] = found
            os.kill(deployment.instances[busy].pid, signal.SIGKILL)
            del urls[busy]
            signal_all(signal.SIGCONT)
            assert await asked == whole
            await Books(urls).check()
            metrics = (await client.get("/metrics")).text
            assert f"epd_serve_request_continuations_total {number}.0" in metrics
