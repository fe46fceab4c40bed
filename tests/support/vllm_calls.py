"""A request to E, P and D of a running deployment without its gateway, so that a link between them can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pictures import png
from PIL import Image
from vllm_runs import Tokens, tokens_of

from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstances
from epd_serve.backends.vllm_command import FEATURE_PORT, KV_PORT
from epd_serve.backends.vllm_server import VllmTarget
from epd_serve.protocol.engine_notices import FeatureWithdrawn, KVUnwanted
from epd_serve.protocol.openai.generation import ChatCompletionRequest
from epd_serve.protocol.wire import DecodeRequest, EncodeRequest, MediaRef, PrefillRequest
from epd_serve.types import Role
from epd_serve.vllm_plugin.notices import Conversation


async def ask_without(
    lost: Literal["kv", "feature"], urls: Mapping[str, str], body: dict[str, Any], image: Image.Image
) -> Tokens:
    """The answer to a chat with a picture, with ``media: rewritten``.

    D finds nobody at P's address, or P gets no feature of the picture that E has described.
    """
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "model_path": "",
        "features": "store",
        "kv": "grouped",
    }
    targets = {f"{role.lower()}0": VllmTarget(role=Role.parse(role), rewrites=True, **given) for role in "EPD"}
    parsed = ChatCompletionRequest.model_validate(body)
    ref = MediaRef(mm_hash=f"of a picture without {lost}", width=image.width, height=image.height)
    async with NativeConnections() as connections:
        others = VllmInstances(connections, targets)
        calls = {name: others.connect(name, urls[name]) for name in targets}
        to_p = calls["p0"].address
        if lost == "kv":
            calls["p0"].address = lambda offset: "127.0.0.1:1" if offset == KV_PORT else to_p(offset)  # type: ignore[method-assign]
        else:
            withdrawn = FeatureWithdrawn(request_id="without", mm_hash=ref.mm_hash)
            await asyncio.to_thread(Conversation(to_p(FEATURE_PORT)).ask, withdrawn, 60)
        request = PrefillRequest(
            request_id="without",
            output=parsed.output(id="chat-1", created=1, model=body["model"]),
            sampling=parsed.sampling(0),
            items=[ref],
            messages=parsed.chat(),
            prompting=parsed.prompting(),
            decode_url=calls["d0"].url,
        )
        prefill = calls["p0"].prefill(request, trace_id="t", media=[png(image)])
        decode = calls["d0"].decode(DecodeRequest(request_id=request.request_id, stream=False), trace_id="t")
        try:
            wanted = EncodeRequest(
                request_id=request.request_id,
                ref=ref,
                media=png(image),
                announce_to=calls["p0"].url if lost == "kv" else "",
            )
            await calls["e0"].encode(wanted, trace_id="t")
            await prefill.opened
            answer = await decode.opened
            whole = b"".join([chunk async for chunk in answer.chunks()])
        finally:
            decode.close()
            prefill.close()
            # P would keep its blocks for a while, in case D comes after all.
            unwanted = KVUnwanted(transfer_id=request.request_id)
            await asyncio.to_thread(Conversation(to_p(KV_PORT)).ask, unwanted, 60)
    return tokens_of(msgspec.json.decode(whole)["choices"][0]["logprobs"])
