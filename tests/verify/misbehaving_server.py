"""A small right server over real sockets, and the faults that can be planted in it, one at a time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import random
from typing import Any

from aiohttp import web
from PIL import Image

WORDS = [
    *("red", "blue", "green", "small", "large", "round", "square", "dark"),
    *("light", "there", "over", "under", "with", "and", "one", "two"),
]
LENGTH = 400
#: Fault → the check that has to find it.
FAULTS = {
    "no model is listed": "api.models",
    "an empty text": "api.types",
    "a wrong finish_reason": "api.types",
    "a usage that does not add up": "api.usage",
    "a picture counts no tokens": "api.usage",
    "max_tokens is ignored": "api.max_tokens",
    "the stream is cut": "api.stream",
    "no [DONE]": "api.stream",
    "several ids": "api.stream",
    "no role": "api.stream",
    "a lost token": "api.stream",
    "a duplicated token": "api.stream",
    "no usage in the stream": "api.stream_usage",
    "500 for a wrong request": "api.errors",
    "any model": "api.unknown_model",
    "[DONE] after an error": "api.long_prompt",
    "spliced features": "answers.batched",
    "a stale prefix": "answers.content",
    "only RGB": "answers.formats",
    "n is ignored": "answers.choices",
    "the seed is ignored": "answers.seeds",
    "the temperature is ignored": "answers.sampling",
    "stop is ignored": "answers.stop",
    "logprobs of other tokens": "answers.logprobs",
    "500 for a placeholder": "answers.placeholders",
    "a bomb is decoded": "media.bombs",
    "500 for a broken picture": "media.broken",
    "requests lost in a burst": "load.burst_200",
    "a leaked block": "load.books",
    "an unlike answer": "answers.reference",
}


class Wrong(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Server:
    """A model without weights: the hash of all that it sees chooses each word."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.running, self.leaked, self.served = fault, 0, 0, 0
        self.last_picture = b""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, _: web.Request) -> web.Response:
        first = {"id": "tiny", "object": "model", "max_model_len": LENGTH}
        return web.json_response(
            {"object": "models" if self.has("no model is listed") else "list", "data": [first]}
        )

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running {self.running + self.leaked}\n")

    def has(self, fault: str) -> bool:
        return self.fault == fault

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            return await self._chat(request)
        except Wrong as wrong:
            return web.json_response({"error": {"message": str(wrong)}}, status=wrong.status)
        finally:
            self.running -= 1

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError:
            raise Wrong(400, "no JSON") from None
        self._check(body)
        text, pictures = self._read(body["messages"])
        if self.has("requests lost in a burst") and self.running > 20:
            assert request.transport is not None
            request.transport.abort()
        if len(text.split()) > LENGTH:
            if self.has("[DONE] after an error"):
                data = b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n'
                return web.Response(body=data, content_type="text/event-stream")
            raise Wrong(400, "too long")
        if pictures and self.running > 1 and self.has("spliced features"):
            pictures, self.last_picture = [self.last_picture or pictures[0]], pictures[0]
        await asyncio.sleep(0.002)
        if self.has("a leaked block"):
            self.leaked += 1
        choices = [self._choice(body, text, pictures, index) for index in range(self._number(body))]
        usage = self._usage(text, pictures, sum(len(one["tokens"]) for one in choices))
        return await (self._stream if body.get("stream") else self._plain)(request, body, choices, usage)

    def _number(self, body: Any) -> int:
        return 1 if self.has("n is ignored") else int(body.get("n", 1))

    def _check(self, body: Any) -> None:
        bad = not isinstance(body.get("messages"), list) or body["messages"][0].get("role") != "user"
        numbers = {"temperature": 0, "max_tokens": 1, "n": 1}
        bad = bad or any(
            not isinstance(body.get(name, least), int | float) or body.get(name, least) < least
            for name, least in numbers.items()
        )
        if bad:
            raise Wrong(500 if self.has("500 for a wrong request") else 400, "wrong")
        if body.get("model") != "tiny" and not self.has("any model"):
            raise Wrong(404, "no such model")

    def _read(self, messages: Any) -> tuple[str, list[bytes]]:
        content, text, pictures = messages[0]["content"], "", []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                text += part["text"]
            else:
                pictures.append(self._picture(part["image_url"]["url"]))
        if "<|image_pad|>" in text and self.has("500 for a placeholder"):
            raise Wrong(500, "54 features for 475 placeholders")
        return text, pictures

    def _picture(self, url: str) -> bytes:
        try:
            if not url.startswith("data:image/"):
                raise ValueError("no data URL")
            data = base64.b64decode(url.partition(",")[2], validate=True)
            image = Image.open(io.BytesIO(data))
            if self.has("only RGB") and image.mode != "RGB":
                raise Wrong(500, image.mode)
            return b"" if self.has("a stale prefix") else image.convert("RGB").tobytes()
        except Wrong:
            raise
        except Image.DecompressionBombError as error:
            raise Wrong(500 if self.has("a bomb is decoded") else 400, str(error)) from None
        except (ValueError, OSError, SyntaxError) as error:
            raise Wrong(500 if self.has("500 for a broken picture") else 400, str(error)) from None

    def _choice(self, body: Any, text: str, pictures: list[bytes], index: int) -> dict[str, Any]:
        salt = b"unlike" if self.has("an unlike answer") else b""
        seen = hashlib.sha256(salt + text.encode() + b"|".join(pictures)).digest()
        temperature = 0 if self.has("the temperature is ignored") else body.get("temperature", 1)
        seed = None if self.has("the seed is ignored") else body.get("seed")
        rng = random.Random(None if seed is None else f"{seed}-{index}")
        most = 12 if self.has("max_tokens is ignored") else min(int(body.get("max_tokens", 12)), 12)
        tokens = []
        for place in range(most):
            first, second = (WORDS[seen[(place * 2 + one) % 32] % 8 + 8 * one] for one in (0, 1))
            share = 0.5 + seen[place] / 1024 + 0.02
            token = second if temperature and rng.random() > share else first
            space = " " if place else ""
            tokens.append((space + token, {space + first: share, space + second: 1 - share}))
        stop = None if self.has("stop is ignored") else (body.get("stop") or [None])[0]
        whole = "".join(token for token, _ in tokens)
        cut = whole[: whole.index(stop)] if stop and stop in whole else whole
        ended = "stop" if cut != whole or most == 12 else "length"
        return {"index": index, "text": cut, "tokens": tokens, "finish": ended}

    def _usage(self, text: str, pictures: list[bytes], completion: int) -> dict[str, int]:
        prompt = len(text.split()) + 16 * len(pictures) * (not self.has("a picture counts no tokens"))
        total = prompt + completion + self.has("a usage that does not add up")
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}

    def _logprobs(self, body: Any, tokens: Any) -> Any:
        if not body.get("logprobs"):
            return None
        if self.has("logprobs of other tokens"):
            tokens = [("other", shares) for _, shares in tokens]
        return {
            "content": [
                {
                    "token": token,
                    "logprob": math.log(max(shares.get(token, 0.5), 1e-9)),
                    "top_logprobs": [{"token": one, "logprob": math.log(share)} for one, share in shares.items()],
                }
                for token, shares in tokens
            ]
        }

    async def _plain(self, _: web.Request, body: Any, choices: Any, usage: Any) -> web.Response:
        told = [
            {
                "index": one["index"],
                "message": {"role": "assistant", "content": "" if self.has("an empty text") else one["text"]},
                "finish_reason": "ended" if self.has("a wrong finish_reason") else one["finish"],
                "logprobs": self._logprobs(body, one["tokens"]),
            }
            for one in choices
        ]
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
        return web.json_response({**head, "choices": told, "usage": usage})

    async def _stream(self, request: web.Request, body: Any, choices: Any, usage: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = 0

        async def send(told: Any, **more: Any) -> None:
            nonlocal number
            number += 1
            name = f"chatcmpl-{number if self.has('several ids') else 1}"
            event = {"id": name, "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": told}
            await response.write(b"data: " + json.dumps({**event, **more}).encode() + b"\n\n")

        for one in choices:
            pieces = self._pieces(one)
            for place, (piece, token) in enumerate(pieces):
                if self.has("the stream is cut") and place == 2:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                role = {} if place or self.has("no role") else {"role": "assistant"}
                told = {"index": one["index"], "delta": {**role, "content": piece}, "finish_reason": None}
                told["logprobs"] = self._logprobs(body, [token] if token else [])
                await send([told])
            await send([{"index": one["index"], "delta": {}, "finish_reason": one["finish"]}])
        if (body.get("stream_options") or {}).get("include_usage") and not self.has("no usage in the stream"):
            await send([], usage=usage)
        if not self.has("no [DONE]"):
            await response.write(b"data: [DONE]\n\n")
        return response

    def _pieces(self, one: Any) -> list[tuple[str, Any]]:
        """The text token by token; a stop string cuts the last one."""
        left, pieces = one["text"], []
        for token in one["tokens"]:
            pieces.append((left[: len(token[0])], token))
            left = left[len(token[0]) :]
        if self.has("a lost token"):
            pieces[1] = ("", pieces[1][1])
        if self.has("a duplicated token"):
            pieces.insert(1, pieces[1])
        return pieces
