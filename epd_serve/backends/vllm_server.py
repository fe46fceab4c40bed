"""One vLLM server: its HTTP calls, its own description of itself, and its tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from epd_serve.backends import vllm_chat
from epd_serve.backends.http_client import HttpPool
from epd_serve.backends.vllm_answer import VllmCall, Work
from epd_serve.backends.vllm_load import VllmFigures, read_figures
from epd_serve.backends.vllm_target import VllmTarget
from epd_serve.errors import InstanceLost, InvalidRequest
from epd_serve.protocol import wire
from epd_serve.protocol.prompt_calls import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from epd_serve.types import SamplingParams

INFO_TIMEOUT_S = 10.0
#: The first request of a process compiles and allocates what later ones find.
WARM_UP_TIMEOUT_S = 300.0

#: Name of requests that are no client's.
_TRIAL = "warm-up"
_GREEDY = SamplingParams(seed=0, temperature=0.0)
#: Requests after which a decoding process has compiled what its sampler needs: functions of vLLM's compile for one
#: sequence, and again for more.
_FIRST_USES: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"logprobs": 1, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 8, "seed": 0},
    {"n": 2, "temperature": 1.0, "top_p": 0.9},
)


class VllmServer:
    """One vLLM server. Attributes: ``name``, ``url``, and ``target``, its entry in the deployment file."""

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
            output=wire.OutputOptions(kind="chat", id="", created=0, model=await self.model_name()),
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
        model = await self.model_name()
        return str((await self.post("/detokenize", {"model": model, "tokens": tokens}, trace_id))["prompt"])

    # ------------------------------------------------------------------ HTTP

    async def warm_up(self, model: str) -> None:
        """Have a fresh process compute all that compiles or allocates at its first use. Raises ServeError."""
        bodies: list[dict[str, Any]] = []
        if self.target.role.decodes:
            bodies += [_short_completion(model) | fields for fields in _FIRST_USES]
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                if self.target.role.has_language_model:
                    for body in (_short_completion(model), *bodies):
                        await self.post(vllm_chat.COMPLETION, body, _TRIAL)
                with contextlib.suppress(InvalidRequest):  # a model without pictures
                    await self._picture_call(model).ask()
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} computed nothing in {WARM_UP_TIMEOUT_S:g} s") from error

    def trial(self, model: str) -> VllmCall:
        """A call that computes a token, or a picture where there is no language model."""
        if self.target.role.has_language_model:
            return self.call(vllm_chat.COMPLETION, _short_completion(model), _TRIAL)
        return self._picture_call(model)

    def _picture_call(self, model: str) -> VllmCall:
        return self.call(
            vllm_chat.CHAT, vllm_chat.picture_body(model, is_new=self.target.features != "file"), _TRIAL
        )

    async def model_name(self) -> str:
        return str((await self.ask_json("/v1/models"))["data"][0]["id"])

    async def figures(self) -> VllmFigures:
        return read_figures((await self.get("/metrics")).decode("utf-8", "replace"))

    async def ask_json(self, path: str, pool: HttpPool | None = None) -> Any:
        """Get a path and decode its JSON; ``pool`` is that of another server of the instance."""
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


def _short_completion(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": [1], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
