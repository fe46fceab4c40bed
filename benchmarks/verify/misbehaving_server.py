"""A small right server over real sockets, and the faults that can be planted in it, one at a time.

It has no weights: the hash of all that it sees chooses each word. ``POST /admin/kill`` stands for the death of a
part of it: streams on their way end with an error, and for some tenths of a second every request is a 503.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import random
import time
import wave
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
    "500 for odd JSON": "api.fuzz",
    "streams as text/plain": "api.headers",
    "a cancelled stream spoils the next answer": "api.cancellation",
    "any model": "api.unknown_model",
    "[DONE] after an error": "api.long_prompt",
    "spliced features": "answers.batched",
    "a stale prefix": "answers.content",
    "a shared picture spoils the second": "answers.one_picture",
    "equal pictures count once": "answers.adjacent",
    "the first frame stands for a video": "answers.videos",
    "a sound is not heard": "answers.sounds",
    "options of one request reach another": "answers.options",
    "an EXIF tag garbles": "answers.exif",
    "the schema is ignored": "answers.schemas",
    "a call's arguments are cut": "answers.tools",
    "room for no token": "answers.edge",
    "only RGB": "answers.formats",
    "n is ignored": "answers.choices",
    "the seed is ignored": "answers.seeds",
    "the temperature is ignored": "answers.sampling",
    "stop is ignored": "answers.stop",
    "logprobs of other tokens": "answers.logprobs",
    "500 for a placeholder": "answers.placeholders",
    "a bomb is decoded": "media.bombs",
    "500 for a broken picture": "media.broken",
    "500 for a broken clip": "media.clips",
    "500 for a URL": "media.urls",
    "an answer about a redirect": "media.redirects",
    "others fail beside a slow URL": "media.slow_server",
    "requests lost in a burst": "load.burst_200",
    "a 200 without text in a burst": "load.burst_500",
    "a client that left is kept": "load.cancel_storm",
    "a stream holds up all others": "load.slow_reader",
    "a leaked block": "load.books",
    "an unlike answer": "answers.reference",
    "a hang after a death": "faults.kill-D",
    "a stream that ends in order after a death": "faults.kill-P",
    "another answer after a death": "faults.kill-E",
    "[DONE] after a death's error": "faults.stop-D",
    "never back": "faults.stop-P",
    "a leak after a death": "faults.storm",
}


class Wrong(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def error_response(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


class Server:
    """The server, with one fault or none."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.running, self.leaked, self.served = fault, 0, 0, 0
        self.last_picture = b""
        self.bounds: Any = None
        self.died_at = -math.inf
        self.spoilt = False
        self.holder = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/admin/kill", self.kill)
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

    async def kill(self, _: web.Request) -> web.Response:
        self.died_at = time.monotonic()
        self.leaked += self.has("a leak after a death")
        self.spoilt = self.has("another answer after a death")
        return web.Response()

    @property
    def is_dead(self) -> bool:
        return time.monotonic() - self.died_at < (math.inf if self.has("never back") else 0.3)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            if self.is_dead:
                raise Wrong(503, "a part of it has died")
            if self.holder.locked() and self.has("others fail beside a slow URL"):
                raise Wrong(500, "busy with a URL")
            async with self.holder:  # taken by one that holds up all others
                pass
            return await self._chat(request)
        except Wrong as wrong:
            return error_response(wrong.status, str(wrong))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as odd:
            return error_response(500 if self.has("500 for odd JSON") else 400, f"an odd request: {odd!r}")
        except (ConnectionError, asyncio.CancelledError):
            self.leaked += self.has("a client that left is kept")
            self.spoilt = self.has("a cancelled stream spoils the next answer")
            raise
        finally:
            self.running -= 1

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self._check(body)
        text, media, num_tokens = await self._read(body["messages"])
        if self.has("requests lost in a burst") and self.running > 20:
            assert request.transport is not None
            request.transport.abort()
        room = LENGTH - len(text.split()) - num_tokens
        if room < 1 - self.has("room for no token"):
            if self.has("[DONE] after an error"):
                data = b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n'
                return web.Response(body=data, content_type="text/event-stream")
            raise Wrong(400, "the prompt is too long")
        if media and self.running > 1 and self.has("spliced features"):
            media, self.last_picture = [self.last_picture or media[0]], media[0]
        bounds = body.get("mm_processor_kwargs")
        if self.has("options of one request reach another"):
            bounds = self.bounds = bounds or self.bounds
        if bounds:
            media, num_tokens = [one + b"small" for one in media], num_tokens // 4
        await asyncio.sleep(0.002)
        self.leaked += self.has("a leaked block")
        choices = [self._choice(body, text, media, index) for index in range(self._number(body))]
        if self.has("a 200 without text in a burst") and self.running > 20:
            choices[0]["text"] = ""
        usage = self._usage(text, num_tokens, sum(len(one["tokens"]) for one in choices))
        return await (self._stream if body.get("stream") else self._plain)(request, body, choices, usage)

    def _number(self, body: Any) -> int:
        return 1 if self.has("n is ignored") else min(int(body.get("n") or 1), 8)

    def _check(self, body: Any) -> None:
        bad = not isinstance(body.get("messages"), list) or body["messages"][0].get("role") != "user"
        numbers = {"temperature": 0, "max_tokens": 1, "n": 1}
        bad = bad or any(
            not isinstance(body.get(name, least), int | float) or not least <= body.get(name, least) < 1e6
            for name, least in numbers.items()
        )
        if bad:
            raise Wrong(500 if self.has("500 for a wrong request") else 400, "a field is wrong")
        if body.get("model") != "tiny" and not self.has("any model"):
            raise Wrong(404, "no such model here")

    async def _read(self, messages: Any) -> tuple[str, list[bytes], int]:
        """The text, the items as bytes, and how many tokens these are."""
        content, text, items = messages[0]["content"], "", []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part["type"]
            if kind == "text":
                text += part["text"]
            elif kind == "image_url":
                items.append(await self._picture(part["image_url"]["url"]))
            else:
                items.append(self._clip(kind, part[kind]))
        if "<|image_pad|>" in text and self.has("500 for a placeholder"):
            raise Wrong(500, "54 features for 475 placeholders")
        counted = set(items) if self.has("equal pictures count once") else items
        return text, items, 16 * len(counted) * (not self.has("a picture counts no tokens"))

    async def _picture(self, url: str) -> bytes:
        if url.startswith("http:"):
            return await self._fetched(url)
        try:
            if not url.startswith("data:image/"):
                raise Wrong(500 if self.has("500 for a URL") else 400, "a URL that is no data URL")
            data = base64.b64decode(url.partition(",")[2], validate=True)
            image = Image.open(io.BytesIO(data))
            if self.has("only RGB") and image.mode != "RGB":
                raise Wrong(500, image.mode)
            if image.getexif() and self.has("an EXIF tag garbles"):
                return b"garbled"
            return b"" if self.has("a stale prefix") else image.convert("RGB").tobytes()
        except Image.DecompressionBombError as error:
            raise Wrong(500 if self.has("a bomb is decoded") else 400, str(error)) from None
        except (ValueError, OSError, SyntaxError) as error:
            status = 500 if self.has("500 for a broken picture") else 400
            raise Wrong(status, f"a broken picture: {error}") from None

    async def _fetched(self, url: str) -> bytes:
        """It takes no URLs; with some faults it seems to."""
        if self.has("others fail beside a slow URL"):
            async with self.holder:
                await asyncio.sleep(3)
        if self.has("an answer about a redirect"):
            return url.encode()
        raise Wrong(500 if self.has("500 for a URL") else 400, "no URL is fetched here")

    def _clip(self, kind: str, part: Any) -> bytes:
        """Bytes of a video as JPEG frames, or of a sound as WAV."""
        url = part["url"] if kind.endswith("_url") else f"data:audio/wav;base64,{part['data']}"
        form, _, data = url.partition(",")
        try:
            if "video/jpeg" in form:
                frames = [Image.open(io.BytesIO(base64.b64decode(one))).tobytes() for one in data.split(",")]
                return frames[0] if self.has("the first frame stands for a video") else b"|".join(frames)
            if "video" in form:
                raise ValueError("no JPEG frames")
            with wave.open(io.BytesIO(base64.b64decode(data))) as file:
                samples = file.readframes(file.getnframes())
        except (ValueError, OSError, EOFError, wave.Error) as error:
            raise Wrong(500 if self.has("500 for a broken clip") else 400, f"a broken clip: {error}") from None
        return b"" if self.has("a sound is not heard") else samples

    def _choice(self, body: Any, text: str, media: list[bytes], index: int) -> dict[str, Any]:
        salt = b"unlike" if self.has("an unlike answer") or self.spoilt else b""
        if self.has("a shared picture spoils the second") and self.running > 1:
            salt = b"shared"
        seen = hashlib.sha256(salt + text.encode() + b"|".join(media)).digest()
        temperature = 0 if self.has("the temperature is ignored") else body.get("temperature", 1)
        seed = None if self.has("the seed is ignored") else body.get("seed")
        rng = random.Random(None if seed is None else f"{seed}-{index}")
        longest = 40 if body.get("ignore_eos") else 12
        most = longest if self.has("max_tokens is ignored") else min(int(body.get("max_tokens", 12)), longest)
        tokens = []
        for place in range(most):
            first, second = (WORDS[seen[(place * 2 + one) % 32] % 8 + 8 * one] for one in (0, 1))
            share = 0.5 + seen[place % 32] / 1024 + 0.02
            token = second if temperature and rng.random() > share else first
            space = " " if place else ""
            tokens.append((space + token, {space + first: share, space + second: 1 - share}))
        stop = None if self.has("stop is ignored") else (body.get("stop") or [None])[0]
        whole = "".join(token for token, _ in tokens)
        cut = whole[: whole.index(stop)] if stop and stop in whole else whole
        ended = "stop" if cut != whole or most == 12 else "length"
        choice = {"index": index, "text": cut, "tokens": tokens, "finish": ended, "call": ""}
        return self._guided(body, choice)

    def _guided(self, body: Any, choice: dict[str, Any]) -> dict[str, Any]:
        text = '{"color": "blue", "known": true}'
        if body.get("response_format") and not self.has("the schema is ignored"):
            return {**choice, "text": text, "tokens": [(text, {text: 1.0})], "finish": "stop"}
        if body.get("tools"):
            call = text[:-1] if self.has("a call's arguments are cut") else text
            return {**choice, "text": "", "tokens": [], "finish": "tool_calls", "call": call}
        return choice

    def _calls(self, one: Any) -> dict[str, Any]:
        if not one["call"]:
            return {}
        function = {"name": "paint", "arguments": one["call"]}
        return {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": function}]}

    def _usage(self, text: str, num_tokens: int, completion: int) -> dict[str, int]:
        prompt = len(text.split()) + num_tokens
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
                "message": {
                    "role": "assistant",
                    "content": "" if self.has("an empty text") else one["text"],
                    **self._calls(one),
                },
                "finish_reason": "ended" if self.has("a wrong finish_reason") else one["finish"],
                "logprobs": self._logprobs(body, one["tokens"]),
            }
            for one in choices
        ]
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
        return web.json_response({**head, "choices": told, "usage": usage})

    async def _stream(self, request: web.Request, body: Any, choices: Any, usage: Any) -> web.StreamResponse:
        kind = "text/plain" if self.has("streams as text/plain") else "text/event-stream"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        number = 0

        async def send(told: Any, **more: Any) -> None:
            nonlocal number
            number += 1
            name = f"chatcmpl-{number if self.has('several ids') else 1}"
            event = {"id": name, "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": told}
            await response.write(b"data: " + json.dumps({**event, **more}).encode() + b"\n\n")

        began_s, pause_s = time.monotonic(), 0.005 if body.get("ignore_eos") else 0.0
        if self.has("a stream holds up all others") and body.get("max_tokens") == 200:
            async with self.holder:
                await asyncio.sleep(5)
        for one in choices:
            if one["call"]:
                await send([{"index": one["index"], "delta": self._calls(one), "finish_reason": None}])
            pieces = self._pieces(one)
            for place, (piece, token) in enumerate(pieces):
                if self.has("the stream is cut") and place == 2:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if self.died_at > began_s and (ended := await self._dies(request, response, one, send)):
                    return ended
                await asyncio.sleep(pause_s)
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

    async def _dies(self, request: web.Request, response: web.StreamResponse, one: Any, send: Any) -> Any:
        """The end of a stream of which a part has died."""
        if self.has("a hang after a death"):
            await asyncio.sleep(60)
        if self.has("a stream that ends in order after a death"):
            await send([{"index": one["index"], "delta": {}, "finish_reason": one["finish"]}])
            await response.write(b"data: [DONE]\n\n")
            return response
        await response.write(b'data: {"error": {"message": "a part of it has died"}}\n\n')
        if self.has("[DONE] after a death's error"):
            await response.write(b"data: [DONE]\n\n")
            return response
        assert request.transport is not None
        request.transport.close()
        return response

    def _pieces(self, one: Any) -> list[tuple[str, Any]]:
        """The text token by token; a stop string cuts the last one."""
        left, pieces = one["text"], []
        for token in one["tokens"]:
            pieces.append((left[: len(token[0])], token))
            left = left[len(token[0]) :]
        if self.has("a lost token") and len(pieces) > 1:
            pieces[1] = ("", pieces[1][1])
        if self.has("a duplicated token") and len(pieces) > 1:
            pieces.insert(1, pieces[1])
        return pieces
