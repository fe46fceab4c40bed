"""One vLLM server: its HTTP calls, what it says of itself, and its tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from epd_serve.backends import vllm_chat
from epd_serve.backends.base import InstanceLost
from epd_serve.backends.http_client import HttpPool
from epd_serve.backends.vllm_answer import VllmCall, Work
from epd_serve.backends.vllm_load import VllmFigures, read_figures
from epd_serve.backends.vllm_target import VllmTarget
from epd_serve.errors import InvalidRequest
from epd_serve.protocol import wire
from epd_serve.protocol.prompt_calls import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from epd_serve.types import SamplingParams

INFO_TIMEOUT_S = 10.0
#: The first request of a process compiles and allocates what later ones find.
WARM_UP_TIMEOUT_S = 300.0

_GREEDY = SamplingParams(seed=0, temperature=0.0)


class VllmServer:
    """Attributes: ``name``, ``url``, and ``target``, what is known of it beforehand."""

    def __init__(self, pool: HttpPool, target: VllmTarget) -> None:
        self.pool = pool
        self.name = pool.name
        self.url = pool.url
        self.target = target

    # ------------------------------------------------------------------ prompts

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        if request.items:
            raise InvalidRequest("tokenize: vLLM counts the tokens of text alone; leave out the images")
        prefill = wire.PrefillRequest(
            request_id=trace_id,
            output=wire.OutputOptions(
                kind="chat", id="", created=0, model=(await self.ask_json("/v1/models"))["data"][0]["id"]
            ),
            sampling=_GREEDY,
            items=[],
            messages=request.messages,
            prompt=request.prompt,
            prompting=request.prompting,
        )
        if isinstance(request.prompt, list):
            tokens = request.prompt
        else:
            body = vllm_chat.prompt_body(prefill, ())
            tokens = (await self.post("/tokenize", body, trace_id))["tokens"]
        texts = [await self._text([token], trace_id) for token in tokens] if request.with_texts else None
        return TokenizeReply(tokens=tokens, texts=texts)

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        return DetokenizeReply(text=await self._text(request.tokens, trace_id))

    async def _text(self, tokens: list[int], trace_id: str) -> str:
        model = (await self.ask_json("/v1/models"))["data"][0]["id"]
        return str((await self.post("/detokenize", {"model": model, "tokens": tokens}, trace_id))["prompt"])

    # ------------------------------------------------------------------ HTTP

    async def warm_up(self, model: str) -> None:
        """Raises ServeError."""
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await self.compute(model, picture=True)
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} computed nothing in {WARM_UP_TIMEOUT_S:g} s") from error

    async def compute(self, model: str, *, picture: bool) -> None:
        """A token, and a picture, which an instance that encodes alone takes for both. Raises ServeError."""
        if self.target.role.has_language_model:
            body: dict[str, Any] = {"model": model, "prompt": [1], "max_tokens": 2, "temperature": 0}
            await self.post(vllm_chat.COMPLETION, body | {"ignore_eos": True}, "warm-up")
            if not picture:
                return
        with contextlib.suppress(InvalidRequest):  # a model without pictures
            await self.post(vllm_chat.CHAT, vllm_chat.picture_body(model), "warm-up")

    async def figures(self) -> VllmFigures:
        return read_figures((await self.get("/metrics")).decode("utf-8", "replace"))

    async def ask_json(self, path: str, pool: HttpPool | None = None) -> Any:
        """What a path answers; ``pool`` is that of another server of the instance."""
        try:
            return msgspec.json.decode(await self.get(path, pool))
        except msgspec.MsgspecError as error:
            raise InstanceLost(f"{(pool or self.pool).url}{path} is no answer of vLLM ({error})") from error

    async def get(self, path: str, pool: HttpPool | None = None) -> bytes:
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                return await VllmCall(pool or self.pool, "GET", path).ask()
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} said nothing in {INFO_TIMEOUT_S:g} s") from error

    async def post(
        self, path: str, body: dict[str, Any], request_id: str, work: Work | None = None
    ) -> dict[str, Any]:
        call = self.call(path, body, request_id)
        if work is not None:
            work.holds(call)
        try:
            answer: dict[str, Any] = msgspec.json.decode(await call.ask())
        except msgspec.MsgspecError as error:
            raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error
        return answer

    def call(self, path: str, body: dict[str, Any], request_id: str) -> VllmCall:
        return VllmCall(*self.parts_of_call(path, body, request_id))

    def parts_of_call(
        self, path: str, body: dict[str, Any], request_id: str
    ) -> tuple[HttpPool, str, str, str, list[bytes]]:
        headers = f"content-type: application/json\r\n{wire.REQUEST_ID_HEADER}: {request_id}\r\n"
        return self.pool, "POST", path, headers, [msgspec.json.encode(body)]
