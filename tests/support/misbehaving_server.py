"""A small right server of chats over a real socket, and one fault for each suite of verify, planted one at a time.

It has no weights: the hash of the prompt and its pictures chooses each word. ``POST /admin/kill`` stands for the
death of an instance: streams under way end with an error, and for 0.3 s every request is a 503.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import time
from typing import Any

from aiohttp import web
from PIL import Image

WORDS = ["red", "blue", "green", "small", "large", "round", "square", "dark"]
LENGTH = 400
#: Fault → the check that has to find it.
FAULTS = {
    "a lost token": "api.stream",
    "features of a neighbour": "answers.batched",
    "500 for a broken picture": "media.broken",
    "a hang after a death": "faults.kill-D",
}
#: Checks that the right server passes; it knows no videos, tools, seeds and the like.
PASSED = (
    *("api.models", "api.types", "api.usage", "api.max_tokens", "api.stream", "api.stream_usage", "api.errors"),
    *("api.headers", "api.unknown_model", "api.long_prompt", "api.cancellation"),
    *("answers.reference", "answers.batched", "answers.adjacent", "answers.content", "answers.formats"),
    *("answers.logprobs", "answers.placeholders", "media.bombs", "media.broken", "media.urls", "media.redirects"),
    *("faults.kill-D", "faults.storm"),
)


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Server:
    """The server, with one fault or none."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.running = 0
        self.last_pictures = b""
        self.died_at = -math.inf

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/admin/kill", self.kill)
        return app

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "tiny", "object": "model", "max_model_len": LENGTH}
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running {self.running}\n")

    async def kill(self, _: web.Request) -> web.Response:
        self.died_at = time.monotonic()
        return web.Response()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            if time.monotonic() - self.died_at < 0.3:
                raise Refused(503, "an instance has died")
            body = json.loads(await request.read())
            tokens, usage = self._answer(body)
            await asyncio.sleep(0.01)
            return await (self._stream if body.get("stream") else self._plain)(request, body, tokens, usage)
        except Refused as refused:
            return _error(refused.status, str(refused))
        except (ValueError, KeyError) as error:
            return _error(400, f"a wrong request: {error!r}")
        finally:
            self.running -= 1

    def _answer(self, body: Any) -> tuple[list[str], dict[str, int]]:
        message = body["messages"][0]
        numbers = [body.get("temperature", 1), body.get("max_tokens", 1), body.get("n", 1)]
        if message["role"] != "user" or not all(isinstance(one, int | float) for one in numbers):
            raise Refused(400, "a field is wrong")
        if numbers[0] < 0 or min(numbers[1:]) < 1:
            raise Refused(400, "a number is too small")
        if body["model"] != "tiny":
            raise Refused(404, "no such model")
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        pictures = [self._picture(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        seen = b"|".join(pictures)
        if self.fault == "features of a neighbour" and self.running > 1:
            seen, self.last_pictures = self.last_pictures, seen
        num_prompt = len(text.split()) + 16 * len(pictures)
        if num_prompt >= LENGTH:
            raise Refused(400, "the prompt is too long")
        digest = hashlib.sha256(text.encode() + seen).digest()
        count = min(body.get("max_tokens", 12), 40 if body.get("ignore_eos") else 12)
        tokens = [" " * (place > 0) + WORDS[digest[place % 32] % 8] for place in range(count)]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        return tokens, usage

    def _picture(self, url: str) -> bytes:
        if not url.startswith("data:image/"):
            raise Refused(400, "a URL that is no data URL")
        try:
            image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True)))
            return image.convert("RGB").tobytes()
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise Refused(500 if self.fault == "500 for a broken picture" else 400, repr(error)) from None

    async def _plain(self, _: web.Request, body: Any, tokens: list[str], usage: Any) -> web.Response:
        message = {"role": "assistant", "content": "".join(tokens)}
        choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": _logprobs(body, tokens)}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    async def _stream(self, request: web.Request, body: Any, tokens: list[str], usage: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        began_s = time.monotonic()
        for place, token in enumerate(tokens):
            if self.died_at > began_s:
                if self.fault == "a hang after a death":
                    await asyncio.sleep(60)
                await response.write(b'data: {"error": {"message": "an instance has died"}}\n\n')
                assert request.transport is not None
                request.transport.close()
                return response
            await asyncio.sleep(0.005)
            delta = {"content": "" if place == 1 and self.fault == "a lost token" else token}
            delta |= {} if place else {"role": "assistant"}
            finish = "length" if place == len(tokens) - 1 else None
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": _logprobs(body, [token])}
            await response.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(
                b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response


def _logprobs(body: Any, tokens: list[str]) -> Any:
    told = [{"token": one, "logprob": -0.5, "top_logprobs": [{"token": one, "logprob": -0.5}]} for one in tokens]
    return {"content": told} if body.get("logprobs") else None


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)
