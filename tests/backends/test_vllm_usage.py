"""``cached_tokens`` with vLLM: P's prefix cache is told of, D got all KV from P."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from aiohttp import web
from servers import answered

from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstances, VllmTarget
from epd_serve.backends.vllm_command import Connectors
from epd_serve.protocol.wire import ChatMessage, DecodeRequest, OutputOptions, Part, PrefillRequest
from epd_serve.types import Role, SamplingParams


def usage(cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": details}


async def ask(p_cached: int | None, *, stream: bool, for_vllm: str) -> bytes:
    async def answer(request: web.Request) -> web.Response:
        asked, name = await request.json(), request.path.split("/")[1]
        if name == "p0":
            kv = {"do_remote_prefill": True}
            return web.json_response({"choices": [], "usage": usage(p_cached), "kv_transfer_params": kv})
        choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [1], "finish_reason": "stop"}
        if not asked["stream"]:
            return web.json_response({"choices": [choice], "usage": usage(8)})
        told = ({"choices": [choice]}, {"choices": [], "usage": usage(8)})
        events = [msgspec.json.encode(one) for one in told] + [b"[DONE]"]
        return web.Response(body=b"".join(b"data: " + event + b"\n\n" for event in events))

    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "model_path": ""}
    used = Connectors(kv="nixl", pulls=True)
    targets = {f"{role.lower()}0": VllmTarget(role=Role.parse(role), connectors=used, **given) for role in "PD"}
    async with answered(answer) as port, NativeConnections() as connections:
        others = VllmInstances(connections, targets)
        calls = {name: others.connect(name, f"http://127.0.0.1:{port}/{name}") for name in targets}
        request = PrefillRequest(
            request_id="r",
            output=OutputOptions("chat", "c-1", 0, "m", stream=stream, include_usage=True, for_vllm=for_vllm),
            sampling=SamplingParams(seed=0),
            items=[],
            messages=[ChatMessage(role="user", content=[Part(type="text", text="?")])],
            decode_url=calls["d0"].url,
        )
        prefill = calls["p0"].prefill(request, trace_id="r", media=[])
        decode = calls["d0"].decode(DecodeRequest(request_id="r", stream=stream), trace_id="r")
        try:
            await prefill.opened
            assert not calls["p0"].open_calls and calls["d0"].open_calls, "P may leave while D decodes"
            body = bytearray()
            if not stream:
                return b"".join([chunk async for chunk in (await decode.opened).chunks()])
            while not await (await decode.opened).forward(lambda chunk: body.extend(chunk) is None):
                pass
            return bytes(body)
        finally:
            decode.close()
            prefill.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("for_vllm", ["", '{"return_token_ids": true}'])
@pytest.mark.parametrize(("said", "told"), [(4, 4), (0, 0), (None, 0), (40, 9)])
async def test_cached_tokens_are_those_of_p(stream: bool, for_vllm: str, said: int | None, told: int) -> None:
    body = await ask(said, stream=stream, for_vllm=for_vllm)
    assert re.findall(rb'"cached_tokens": ?(\d+)', body) == [b"%d" % told]
