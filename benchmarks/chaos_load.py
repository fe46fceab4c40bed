"""The requests of the chaos run, and the judgement of their answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import httpx
import numpy as np
from PIL import Image

#: Statuses of a clear error that a fault may lead to.
_FAULT_STATUSES = (429, 500, 502, 503, 504)
_NUM_PICTURES = 24
_QUESTIONS = (
    "What color is the circle?",
    "What is in the picture?",
    "How many shapes are there?",
    "Where is the blue square?",
)
_TEXTS = ("What is the capital of France?", "Count to 9.", "What is 2 + 3?", "Repeat: apple banana cherry")


class Outcome(StrEnum):
    IDENTICAL = "identical"
    ERROR = "clear error"
    CANCELLED = "cancelled by the client"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. Equal ``key``, equal answer.

    ``patience_s``: the client leaves after so long; None: it waits for the answer.
    """

    key: str
    body: dict[str, Any]
    patience_s: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """``detail``: what was wrong, or the status of a clear error; ``seconds``: until that was known."""

    outcome: Outcome
    text: str = ""
    detail: str = ""
    seconds: float = 0.0


def make_requests(count: int, seed: int) -> list[Request]:
    """Texts, pictures (few enough that most are asked about again), two pictures, streams, impatient clients."""
    rng = random.Random(seed)
    return [_make_request(rng) for _ in range(count)]


def make_streams(count: int, seed: int) -> list[Request]:
    """Streams of patient clients, long enough that a fault meets many in their middle."""
    rng = random.Random(seed)
    streams = []
    for request in make_requests(count, seed):
        body = request.body | {"stream": True, "max_tokens": rng.choice((48, 120, 250))}
        key = json.dumps(body)
        streams.append(Request(key=blake2b(key.encode(), digest_size=8).hexdigest(), body=body, patience_s=None))
    return streams


def _make_request(rng: random.Random) -> Request:
    pictures = [rng.randrange(_NUM_PICTURES) for _ in range(rng.choice((0, 0, 1, 1, 1, 2)))]
    text = rng.choice(_QUESTIONS if pictures else _TEXTS) + " apple" * rng.choice((0, 0, 20, 120))
    max_tokens = rng.choice((1, 16, 96, 250))
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _picture(one)}} for one in pictures]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": rng.random() < 0.5,
    }
    impatient = rng.random() < 0.15
    return Request(
        key=f"{pictures} {max_tokens} {text}", body=body, patience_s=rng.uniform(0, 1.5) if impatient else None
    )


def _picture(number: int) -> str:
    """A data URL: coloured rectangles under noise, of one of three sizes."""
    rng = np.random.default_rng(number)
    width, height = ((120, 90), (200, 150), (90, 240))[number % 3]
    pixels = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
    for _ in range(3):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        pixels[y : y + 50, x : x + 50] += rng.integers(0, 190, 3, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


async def ask(client: httpx.AsyncClient, request: Request, expected: str | None, deadline_s: float) -> Result:
    """Ask and judge. Without ``expected`` any complete answer counts as identical.

    Before the deadline there must be the whole answer or an error that says what happened; a stream that breaks
    off must say so too, and what came before must be the beginning of the right answer.
    """
    started = time.monotonic()
    result = await _ask(client, request, expected, deadline_s)
    return replace(result, seconds=time.monotonic() - started)


async def _ask(client: httpx.AsyncClient, request: Request, expected: str | None, deadline_s: float) -> Result:
    limit_s = deadline_s if request.patience_s is None else request.patience_s
    try:
        async with asyncio.timeout(limit_s):
            if request.body["stream"]:
                return await _stream(client, request, expected)
            return await _whole(client, request, expected)
    except TimeoutError:
        if request.patience_s is not None:
            return Result(outcome=Outcome.CANCELLED)
        return Result(outcome=Outcome.HANG, detail=f"no answer in {deadline_s:g} s")
    except httpx.TransportError as error:
        return Result(outcome=Outcome.WRONG, detail=f"the gateway broke off without a word: {error!r}")


async def _whole(client: httpx.AsyncClient, request: Request, expected: str | None) -> Result:
    answer = await client.post("/v1/chat/completions", json=request.body)
    if answer.status_code != 200:
        return _judge_error(answer.status_code, answer.text)
    choice = answer.json()["choices"][0]
    return _judge(f"{choice['message']['content']} [{choice['finish_reason']}]", expected)


async def _stream(client: httpx.AsyncClient, request: Request, expected: str | None) -> Result:
    text, finish, events = "", "", ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=request.body) as answer:
            if answer.status_code != 200:
                return _judge_error(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                events = line or events
                if line.startswith("data: {") and "error" not in (event := json.loads(line[6:])):
                    choice = event["choices"][0]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    except httpx.RemoteProtocolError:
        if not events.startswith('data: {"error"'):
            return Result(outcome=Outcome.WRONG, text=text, detail="a stream was cut without a word")
        if expected is not None and not expected.startswith(text):
            return Result(outcome=Outcome.WRONG, text=text, detail="a broken stream began wrongly")
        return Result(outcome=Outcome.ERROR, text=text, detail="stream broken off")
    if events != "data: [DONE]":
        return Result(outcome=Outcome.WRONG, text=text, detail="a stream ended in order and is not complete")
    return _judge(f"{text} [{finish}]", expected)


def _judge(text: str, expected: str | None) -> Result:
    if expected is None or text == expected:
        return Result(outcome=Outcome.IDENTICAL, text=text)
    return Result(outcome=Outcome.WRONG, text=text, detail=f"expected {expected!r}")


def _judge_error(status: int, body: str) -> Result:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    if status in _FAULT_STATUSES and message:
        return Result(outcome=Outcome.ERROR, text=message, detail=str(status))
    return Result(outcome=Outcome.WRONG, detail=f"status {status}: {body[:200]}")
