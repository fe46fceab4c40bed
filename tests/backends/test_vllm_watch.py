"""How vLLM instances are judged: by their server at once, by their engine within minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_serve.backends import vllm_chat
from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstance, VllmInstances
from epd_serve.backends.vllm_answer import VllmCall
from epd_serve.backends.vllm_server import IDLE_S, STUCK_S, EngineWatch, VllmFigures, VllmTarget
from epd_serve.errors import Conflict, InstanceFailed, InvalidRequest, StageTimeout, Unavailable
from epd_serve.protocol.instance_state import LeaveOrder, RoleOrder
from epd_serve.rpc.http import HttpServer
from epd_serve.types import Role

PROMPT_S = 20


@dataclass
class Server:
    """Answers as vLLM's does; ``computes`` says whether its engine ends a step, ``answers`` whether it serves."""

    port: int = 0
    running: int = 0
    tokens: int = 0
    status: int = 200
    health: int = 200
    computes: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    computing: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def figures(self) -> VllmFigures:
        return VllmFigures(
            started_at=1.0,
            num_running=self.running,
            num_waiting=0,
            progress=self.tokens,
            block_size=16,
            num_blocks=10,
            kv_usage=0.0,
        )

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            length = int((head.lower().partition(b"content-length: ")[2] or b"0").split()[0])
            body = await reader.readexactly(length)
            self.asked.append((path, msgspec.json.decode(body) if body else None))
            await self.answers.wait()
            await self._reply(path, writer)

    async def _reply(self, path: str, writer: asyncio.StreamWriter) -> None:
        answer, status = b"{}", 200
        if path == "/v1/models":
            answer = b'{"data": [{"id": "m", "max_model_len": 99}]}'
        elif path == "/health":
            status = self.health
        elif path == "/metrics":
            told = {
                "vllm:num_requests_running": self.running,
                "vllm:prompt_tokens_total": self.tokens,
                "process_start_time_seconds": 7,
            }
            answer = "".join(f"{name} {value}\n" for name, value in told.items()).encode()
        elif path.startswith("/v1/"):
            self.computing.set()
            await self.computes.wait()
            answer, status = b'{"error": {"message": "of its own"}}' if self.status != 200 else b"{}", self.status
        writer.write(b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n" % (status, len(answer)) + answer)
        await writer.drain()


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[Server]:
    server = Server(**fields)
    server.answers.set()
    server.computes.set()
    open_ones: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await server.talk(reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            open_ones.discard(task)
            writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in list(open_ones):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


def target(role: str, **fields: Any) -> VllmTarget:
    return VllmTarget(role=Role.parse(role), device="cpu", dtype="float32", model_path="/model", **fields)


@asynccontextmanager
async def instance(server: Server, role: str = "PD") -> AsyncIterator[VllmInstance]:
    name = f"{role.lower()}0"
    async with NativeConnections() as connections:
        yield VllmInstances(connections, {name: target(role)}).connect(name, f"http://127.0.0.1:{server.port}")


async def test_a_step_that_takes_long_is_no_death() -> None:
    """Its counters stand still, with a request."""
    async with serving(running=1, tokens=5) as server, instance(server) as calls:
        await calls.info()
        server.computes.clear()
        for _ in range(3):
            await calls.probe(PROMPT_S)


async def test_a_server_that_says_nothing_is_lost_at_once() -> None:
    async with serving() as server, instance(server) as calls:
        await calls.info()
        server.answers.clear()
        with pytest.raises(StageTimeout, match="does not answer within"):
            await calls.probe(0.3)


async def test_a_server_that_reads_a_burst_of_calls_may_answer_later() -> None:
    async with serving() as server, instance(server) as calls:
        await calls.info()
        server.answers.clear()
        calls._prompts |= dict.fromkeys(range(10), 1)
        asyncio.get_running_loop().call_later(0.6, server.answers.set)
        await calls.probe(0.2)
        server.answers.clear()
        with pytest.raises(StageTimeout, match=r"does not answer within 1\.2 s"):
            await calls.probe(0.2)


async def test_an_engine_that_stands_still_for_minutes_is_stuck() -> None:
    watch = EngineWatch("d0")
    server = Server(running=1, tokens=5)
    watch.look(server.figures(), 1000.0, unwanted)
    watch.look(server.figures(), 1000.0 + STUCK_S, unwanted)
    server.tokens += 1
    watch.look(server.figures(), 1001.0 + STUCK_S, unwanted)
    watch.look(server.figures(), 1000.0 + 2 * STUCK_S, unwanted)
    with pytest.raises(StageTimeout, match="computed nothing"):
        watch.look(server.figures(), 1002.0 + 2 * STUCK_S, unwanted)


async def test_an_idle_engine_is_given_little_to_do_and_all_the_time_it_wants() -> None:
    async with serving() as server, NativeConnections() as connections:
        at = HttpServer("d0", f"http://127.0.0.1:{server.port}", connections.http)
        watch, made = EngineWatch("d0"), []

        def trial() -> VllmCall:
            made.append(VllmCall(at, "/v1/completions", {}))
            return made[-1]

        def look(now: float) -> None:
            watch.look(server.figures(), now, trial)

        server.computes.clear()
        for now in (0.0, 1.0, IDLE_S):
            look(now)
        assert not made, "it is idle for a moment only"
        look(IDLE_S + 1)
        look(IDLE_S + STUCK_S)
        assert len(made) == 1
        with pytest.raises(StageTimeout):
            look(IDLE_S + 2 + STUCK_S)
        server.computes.set()
        await made[0].opened
        for now in (0.0, IDLE_S):
            look(1000.0 + now)
        assert len(made) == 1
        server.status = 500
        look(1001.0 + IDLE_S)
        with pytest.raises(InstanceFailed):
            await made[1].opened
        with pytest.raises(InstanceFailed, match="of its own"):
            look(1002.0 + IDLE_S)


def unwanted() -> VllmCall:
    raise AssertionError("it has work")


async def test_a_fresh_process_meets_all_that_compiles_before_it_gets_work() -> None:
    async with serving() as server, instance(server) as calls:
        assert (await calls.info()).ready
        bodies = [body for path, body in server.asked if path == vllm_chat.COMPLETION]
        assert any(body.get("logprobs") and body.get("n") == 2 and body.get("top_p") for body in bodies)
        assert any(body.get("logprobs") and "n" not in body for body in bodies)
        assert server.paths()[-1] == vllm_chat.CHAT, "and a picture"
        server.asked.clear()
        await calls.info()
        assert server.paths() == [], "it has nothing to do, and is not made to write its figures"
    async with serving(running=1) as server, instance(server) as calls:
        await calls.info()
        server.asked.clear()
        await calls.info()
        assert "/metrics" in server.paths()


async def test_an_idle_instance_that_is_lost_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.backends.vllm._IDLE_SIGN_S", 0.0)
    async with serving() as server, instance(server) as calls:
        await calls.info()
        await calls.info()
        assert server.paths()[-1] == "/health"
        server.health = 503
        with pytest.raises(Unavailable):
            await calls.info()
        server.asked.clear()
        await calls.info(doubted=True)
        assert "/metrics" in server.paths()


def test_a_picture_to_warm_up_with_is_none_of_a_client() -> None:
    bodies = [vllm_chat.trial_body("m", "image", is_new=is_new) for is_new in (True, True, False, False)]
    names = [body["messages"][0]["content"][0]["uuid"] for body in bodies]
    assert len(set(names)) == 3, "where it stays for good, there is one"
    assert all(body["ec_transfer_params"]["trial"] for body in bodies)


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
        with pytest.raises(Conflict, match="called back"):
            await under_way
        assert (await calls.switch(RoleOrder("PD"))).new == "PD"
        assert [(await calls.switch(RoleOrder(role))).new for role in ("P", "PD")] == ["P", "PD"]
        with pytest.raises(InvalidRequest, match="can become D, P, and not EPD"):
            await calls.switch(RoleOrder("EPD"))


@pytest.mark.parametrize("fields", [{"kv": "nixl"}, {"pulls": True}])
async def test_processes_of_one_role_keep_it_and_say_what_would_be_right(fields: dict[str, Any]) -> None:
    async with serving() as server, switchable(server, **fields) as calls:
        with pytest.raises(InvalidRequest, match=r"keeps its role P: only with vllm\.kv: mooncake .*apply a file"):
            await calls.switch(RoleOrder("D"))
