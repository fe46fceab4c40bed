"""How vLLM instances are judged: by their server at once, by their engine within minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from servers import answered
from vllm_backend import target

from epd_serve.backends import vllm, vllm_request
from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstance, VllmInstances
from epd_serve.errors import Conflict, InvalidRequest, StageTimeout
from epd_serve.protocol.instance_state import LeaveOrder, RoleOrder

PROMPT_S = 20


@dataclass
class Server:
    """Answers as vLLM's does, as long as ``answers`` is set."""

    running: int = 0
    tokens: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    port: int = 0

    def metrics(self) -> str:
        return (
            f"vllm:num_requests_running {self.running}\nvllm:prompt_tokens_total {self.tokens}\n"
            "process_start_time_seconds 7\n"
        )

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        await self.answers.wait()
        if request.path == "/metrics":
            return web.Response(text=self.metrics())
        return web.json_response({"data": [{"id": "m", "max_model_len": 99}]})


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[Server]:
    server = Server(**fields)
    server.answers.set()
    async with answered(server.answer) as server.port:
        try:
            yield server
        finally:
            server.answers.set()


@asynccontextmanager
async def instance(server: Server, role: str = "PD") -> AsyncIterator[VllmInstance]:
    name = f"{role.lower()}0"
    async with NativeConnections() as connections:
        yield VllmInstances(connections, {name: target(role)}).connect(name, f"http://127.0.0.1:{server.port}")


async def test_a_long_step_is_no_death_and_a_silent_server_is_lost_at_once() -> None:
    async with serving(running=1, tokens=5) as server, instance(server) as calls:
        await calls.info()
        for _ in range(3):
            await calls.probe(PROMPT_S)  # with a request, its counters stand still
        server.answers.clear()
        with pytest.raises(StageTimeout, match="does not answer within"):
            await calls.probe(0.3)


async def test_a_server_that_reads_a_burst_of_calls_may_answer_later() -> None:
    async with serving() as server, instance(server) as calls:
        await calls.info()
        server.answers.clear()
        calls._encodes |= dict.fromkeys(range(10), 1)
        asyncio.get_running_loop().call_later(0.6, server.answers.set)
        await calls.probe(0.2)
        server.answers.clear()
        with pytest.raises(StageTimeout, match=r"does not answer within 1\.2 s"):
            await calls.probe(0.2)


async def test_a_silent_server_with_many_calls_is_not_taken_for_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "INFO_TIMEOUT_S", 0.2)
    async with serving() as server, instance(server) as calls:
        await calls.info()
        server.answers.clear()
        calls._encodes |= dict.fromkeys(range(5), 1)
        with pytest.raises(StageTimeout, match="does not answer within"):
            await calls.probe(0.1)


async def test_an_engine_that_stands_still_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "STUCK_S", 0.3)
    async with serving(running=1, tokens=5) as server, instance(server) as calls:
        for _ in range(3):  # it moves
            await calls.info()
            await asyncio.sleep(0.2)
            await calls.probe(PROMPT_S)
            server.tokens += 1
        server.tokens -= 1
        await asyncio.sleep(0.2)
        await calls.info()
        with pytest.raises(StageTimeout, match="computed nothing"):
            await calls.probe(PROMPT_S)


async def test_a_fresh_process_meets_all_that_compiles_before_it_gets_work() -> None:
    async with serving() as server, instance(server) as calls:
        assert (await calls.info()).ready
        bodies = [body for path, body in server.asked if path == vllm_request.COMPLETION]
        assert any(body.get("logprobs") and body.get("n") == 2 and body.get("top_p") for body in bodies)
        assert any(body.get("logprobs") and "n" not in body for body in bodies)
        assert server.paths()[-1] == vllm_request.CHAT, "and a picture"


@asynccontextmanager
async def switchable(server: Server, directory: Path | None = None, **fields: Any) -> AsyncIterator[VllmInstance]:
    fields = {"features": "store", "kv": "mooncake", **fields}
    async with NativeConnections() as connections:
        others = VllmInstances(connections, {"p0": target("P", **fields), "d0": target("D", **fields)}, directory)
        yield others.connect("p0", f"http://127.0.0.1:{server.port}")


async def test_p_becomes_d_once_it_is_empty(tmp_path: Path) -> None:
    async with serving(running=1) as server, switchable(server, tmp_path) as calls:
        assert (await calls.info()).role == "P"
        with pytest.raises(StageTimeout, match=r"still had requests after 0\.2 s; it serves P"):
            await calls.switch(RoleOrder("D", deadline_s=0.2))
        under_way = asyncio.create_task(calls.switch(RoleOrder("D")))
        await asyncio.sleep(0.05)
        assert not under_way.done() and (await calls.info()).role == "P"
        server.running = 0
        changed = await under_way
        assert (changed.old, changed.new, (await calls.info()).role) == ("P", "D", "D")
        again = VllmInstances(calls._others.connections, calls._others.targets, tmp_path)
        assert str(again.connect("p0", calls.url).target.role) == "D", "a gateway that is started again knows it"
        assert (await calls.leave(LeaveOrder())).seconds < 5


async def test_an_order_is_called_back_and_where_a_stage_stays_no_instance_need_be_empty() -> None:
    async with serving(running=1) as server, switchable(server) as calls:
        under_way = asyncio.create_task(calls.switch(RoleOrder("D")))
        await asyncio.sleep(0.05)
        assert (await calls.switch(RoleOrder("P"))).new == "P"
        with pytest.raises(Conflict, match="ordered to serve P"):
            await under_way
        assert (await calls.switch(RoleOrder("PD"))).new == "PD"
        assert [(await calls.switch(RoleOrder(role))).new for role in ("P", "PD")] == ["P", "PD"]
        with pytest.raises(InvalidRequest, match="can become D, P, but not EPD"):
            await calls.switch(RoleOrder("EPD"))


@pytest.mark.parametrize("fields", [{"kv": "nixl"}, {"pulls": True}])
async def test_processes_of_one_role_keep_it(fields: dict[str, Any]) -> None:
    async with serving() as server, switchable(server, **fields) as calls:
        with pytest.raises(InvalidRequest, match="nothing else, but not D"):
            await calls.switch(RoleOrder("D"))
