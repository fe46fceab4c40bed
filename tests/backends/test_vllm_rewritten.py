"""Pictures that P and D get without pixels, and the fate of a request whose feature or KV does not come then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstance, VllmInstances
from epd_serve.backends.vllm_server import VllmTarget
from epd_serve.errors import InstanceFailed
from epd_serve.protocol.wire import (
    ChatMessage,
    DecodeRequest,
    EncodeRequest,
    MediaRef,
    OutputOptions,
    Part,
    PrefillRequest,
)
from epd_serve.types import Role, SamplingParams

GRID = {"image_grid_thw": [1, 6, 8]}
PIXELS = b"\x89PNG "


@dataclass
class Server:
    """Says what a vLLM server would. The instances that ``loses`` names fail at prompts without pixels."""

    tells: bool = True
    loses: str = ""
    bodies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body, name = await request.json(), request.path.split("/")[1]
        self.bodies.setdefault(name, []).append(body)
        parts = [part for message in body["messages"] for part in message["content"]]
        if name == "e0":
            told = {part["uuid"]: {"metadata": GRID if self.tells else {}} for part in parts}
            return web.json_response({"ec_transfer_params": told})
        is_lost = name in self.loses and any(part["type"] == "image_embeds" for part in parts)
        if name == "p0" and not is_lost:
            return web.json_response(
                {"usage": {"prompt_tokens": 9}, "kv_transfer_params": {"do_remote_prefill": True}}
            )
        if not body["stream"]:
            if is_lost:
                return web.json_response({"error": {"message": "no KV"}}, status=500)
            return web.json_response({"choices": []})
        events = web.StreamResponse()
        await events.prepare(request)
        said = [b'data: {"error":{"message":"no KV"}}'] if is_lost else [b'data: {"choices":[]}']
        for event in (*said, b"data: [DONE]"):
            await events.write(event + b"\n\n")
        return events


@asynccontextmanager
async def instances(server: Server, **fields: Any) -> AsyncIterator[dict[str, VllmInstance]]:
    """E, P and D at one server, on paths of their own."""
    app = web.Application()
    app.router.add_post("/{name}/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "model_path": "/model", "features": "store"}
    given |= {"kv": "grouped", "rewrites": True, **fields}
    targets = {f"{role.lower()}0": VllmTarget(role=Role.parse(role), **given) for role in "EPD"}
    try:
        async with NativeConnections() as connections:
            others = VllmInstances(connections, targets)
            yield {name: others.connect(name, f"http://127.0.0.1:{port}/{name}") for name in targets}
    finally:
        await runner.cleanup()


async def ask(server: Server, *, stream: bool = False, n: int = 1, **fields: Any) -> bytes:
    """D's answer to a chat with a picture, another, and the first again."""
    refs = [MediaRef(mm_hash=name, width=8, height=6) for name in ("a", "b", "a")]
    content = [Part(type="image"), Part(type="text", text="?"), Part(type="image"), Part(type="image")]
    async with instances(server, **fields) as calls:
        request = PrefillRequest(
            request_id="r",
            output=OutputOptions(kind="chat", id="c-1", created=0, model="m", stream=stream),
            sampling=SamplingParams(seed=0, temperature=1.0, n=n),
            items=refs,
            messages=[ChatMessage(role="user", content=content)],
            decode_url=calls["d0"].url,
        )
        prefill = calls["p0"].prefill(request, trace_id="r", media=[PIXELS] * 3)
        decode = calls["d0"].decode(DecodeRequest(request_id="r", stream=stream), trace_id="r")
        try:
            for ref in refs[:2]:
                if n == 1:
                    early = {"e0", "p0"} if fields.get("kv") == "mooncake" else {"e0"}
                    assert server.bodies.keys() <= early, "they are called before all is known"
                wanted = EncodeRequest(request_id="r", ref=ref, media=PIXELS, announce_to=calls["p0"].url)
                await calls["e0"].encode(wanted, trace_id="r")
            await prefill.opened
            answer = await decode.opened
            return b"".join([chunk async for chunk in answer.chunks()])
        finally:
            decode.close()
            prefill.close()


def pictures(body: dict[str, Any]) -> list[tuple[str, str]]:
    parts = [part for part in body["messages"][0]["content"] if part["type"] != "text"]
    assert all(part.get("image_embeds", GRID) == GRID for part in parts)
    return [(part["type"], part["uuid"]) for part in parts]


REWRITTEN = [("image_embeds", name) for name in ("a", "b", "a")]
#: Under names of their own: what vLLM keeps of a picture by name must not be what it has without pixels.
RAW = [("image_url", f"{name}:pixels") for name in ("a", "b", "a")]


@pytest.mark.parametrize("stream", [False, True])
async def test_p_and_d_get_what_e_tells(stream: bool) -> None:
    server = Server()
    assert b"choices" in await ask(server, stream=stream)
    [at_p], [at_d] = server.bodies["p0"], server.bodies["d0"]
    assert pictures(at_p) == pictures(at_d) == REWRITTEN
    assert at_p["ec_transfer_params"] == {"request_id": "r", "expect": True, "names": ["a", "b", "a"]}
    assert at_d["kv_transfer_params"]["do_remote_prefill"] and "ec_transfer_params" not in at_d


async def test_p_gets_pixels_where_its_connector_cannot_tell_d_of_a_failure() -> None:
    server = Server()
    await ask(server, kv="mooncake", pulls=True)
    assert [pictures(body) for body in server.bodies["p0"]] == [RAW]
    assert [pictures(body) for body in server.bodies["d0"]] == [REWRITTEN]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv": "nixl", "pulls": True}])
async def test_d_computes_the_prompt_where_p_lacks_a_feature(stream: bool, fields: dict[str, Any]) -> None:
    """The server's D refuses prompts without pixels then, as no KV comes."""
    server = Server(loses="p0 d0")
    answer = await ask(server, stream=stream, **fields)
    assert b"choices" in answer and b"error" not in answer
    assert [pictures(body) for body in server.bodies["p0"]] == [REWRITTEN]
    last = server.bodies["d0"][-1]
    assert pictures(last) == RAW and "kv_transfer_params" not in last


@pytest.mark.parametrize("stream", [False, True])
async def test_where_kv_does_not_come_d_gets_the_pixels(stream: bool) -> None:
    server = Server(loses="d0")
    answer = await ask(server, stream=stream)
    assert b"choices" in answer and b"error" not in answer
    assert [pictures(body) for body in server.bodies["d0"]] == [REWRITTEN, RAW]
    assert "kv_transfer_params" not in server.bodies["d0"][1]


@pytest.mark.parametrize("stream", [False, True])
async def test_where_d_is_not_to_compute_prompts_the_request_fails(stream: bool) -> None:
    server = Server(loses="d0")
    with pytest.raises(InstanceFailed, match="no KV"):
        await ask(server, stream=stream, recomputes=False)
    assert [pictures(body) for body in server.bodies["d0"]] == [REWRITTEN]


async def test_what_e_does_not_tell_of_goes_with_pixels_and_kv() -> None:
    server = Server(tells=False)
    await ask(server)
    [at_p], [at_d] = server.bodies["p0"], server.bodies["d0"]
    assert pictures(at_p) == pictures(at_d) == RAW
    assert at_p["ec_transfer_params"]["names"] == ["a", "b", "a"]
    assert at_d["kv_transfer_params"]["do_remote_prefill"]


async def test_d_that_computes_the_prompt_gets_pixels() -> None:
    """No KV comes for several choices."""
    server = Server()
    await ask(server, n=2)
    [body] = server.bodies["d0"]
    assert pictures(body) == RAW
    assert "kv_transfer_params" not in body
