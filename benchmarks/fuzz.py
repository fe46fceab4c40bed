"""Thousands of broken requests against a real deployment: no 5xx, no hang, no leak.

    python -m benchmarks.fuzz --cases 20000 --output benchmarks/results/fuzz.json

Every answer is checked: its status, that it is JSON (or a stream with an end) and that errors have OpenAI's shape.
Afterwards the deployment must be idle, its books balanced, valid requests answered as before, and its processes no
larger than after the first tenth of the cases, within a margin.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from PIL import Image

from benchmarks.common import argument_parser, data_url, encoded, machine
from benchmarks.deployed import held_in
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "f", "parameters": _SCHEMA}
_DEEP = 3000


@dataclass(frozen=True, slots=True)
class Case:
    """One request; ``headers`` go beside the content type."""

    path: str
    body: bytes
    headers: dict[str, str]


def picture(colour: str) -> str:
    """A data URL of 40x30 pixels."""
    return data_url(encoded(Image.new("RGB", (40, 30), colour)))


def valid_bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that are answered with 200, each with few tokens."""
    text = [{"role": "user", "content": "How many apples?"}]
    image = {"type": "image_url", "image_url": {"url": picture("red"), "detail": "auto"}}
    parts = [image, {"type": "text", "text": "What is it?"}]
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [_call()]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    tool = {"type": "function", "function": _FUNCTION}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
    penalties = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"40": 5},
    }
    chat, turn = "/v1/chat/completions", [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    return [
        (chat, {"model": "demo", "messages": text, "max_tokens": 2, "temperature": 0}),
        (chat, {"messages": text, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
        (chat, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "seed": 1, "stop": ["x"]}),
        (chat, {"messages": history, "tools": [tool], "tool_choice": "auto", "max_tokens": 2}),
        (chat, {"messages": text, "response_format": schema, "max_completion_tokens": 16}),
        (chat, {"messages": text, "n": 2, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "top_p": 0.9}),
        (chat, {"messages": text, "max_tokens": 2, **penalties}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "echo": True}),
        ("/v1/completions", {"prompt": [[40, 41], [42]], "max_tokens": 1, "logprobs": 1, "n": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "[a-c]{2}"}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "bad_words": ["x"], "allowed_token_ids": [40, 41]}),
        ("/v1/responses", {"input": turn, "max_output_tokens": 2, "metadata": {"a": "b"}, "store": False}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "tools": [{"type": "function", **_FUNCTION}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": parts}], "return_token_strs": True}),
        ("/tokenize", {"prompt": "Hi there", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [40, 41, 42]}),
    ]


def _call() -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}


def nasty_values(rng: random.Random) -> Any:
    """A value that a field may not expect."""
    return rng.choice(
        [
            None,
            True,
            -1,
            0,
            2**31,
            2**63,
            -(2**63) - 1,
            10**40,
            1e308,
            -0.0,
            0.1,
            "",
            "x",
            "\x00",
            "\ud800",
            "é" * 50,
            "a" * 5000,
            "<|image_pad|>",
            "<tool_call>\n",
            "{{ messages }}",
            "data:image/png;base64,AAAA",
            "data:image/png;base64,%%%",
            "http://127.0.0.1:1/x.png",
            "file:///etc/passwd",
            "gopher://x",
            [],
            {},
            [[]],
            [None],
            ["x", 1],
            {"": ""},
            {"type": "text"},
            {"$ref": "#"},
            {"anyOf": [{"$ref": "#"}]},
            {"type": "string", "pattern": "(a{1,9000}){9000}"},
            {"type": "array", "minItems": 10**9},
            [0] * 3000,
        ]
    )


class Fuzzer:
    """Cases from a seed; the same seed gives the same cases."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._valid = valid_bodies()

    def case(self) -> Case:
        rng = self._rng
        path, body = rng.choice(self._valid)
        body = copy.deepcopy(body)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            self._change(body)
        data = self._written(body)
        if rng.random() < 0.2:
            data = self._damaged(data)
        headers = {"x-request-id": self._rng.choice(("a", "\x7f", "x" * 300))} if rng.random() < 0.05 else {}
        return Case(path, data, headers)

    def _change(self, body: dict[str, Any]) -> None:
        """One thing, somewhere inside."""
        rng = self._rng
        holder: Any = body
        while True:
            places: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not places:
                return
            place = rng.choice(places)
            if isinstance(holder[place], dict | list) and holder[place] and rng.random() < 0.6:
                holder = holder[place]
                continue
            break
        what = rng.random()
        if what < 0.6:
            holder[place] = nasty_values(rng)
        elif what < 0.75:
            del holder[place]
        elif what < 0.85 and isinstance(holder, list):
            holder.extend([holder[place]] * rng.choice((1, 3, 200)))
        elif isinstance(holder, dict):
            holder[rng.choice(("x", "", "stream", "n", "seed", "temperature", "messages"))] = nasty_values(rng)

    def _written(self, body: dict[str, Any]) -> bytes:
        text = json.dumps(body, ensure_ascii=self._rng.random() < 0.5)
        return text.encode("utf-8", "surrogatepass")

    def _damaged(self, data: bytes) -> bytes:
        rng = self._rng
        place = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(9)
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + rng.randbytes(rng.choice((1, 8))) + data[place + 1 :]
        if kind == 2:  # the same key twice
            return data[:1] + b'"max_tokens": 1, "max_tokens": "x", ' + data[1:]
        if kind == 3:
            return (
                data[:1]
                + b'"temperature": '
                + rng.choice((b"NaN", b"Infinity", b"1e999", b"-"))
                + b", "
                + data[1:]
            )
        if kind == 4:
            return data[:1] + b'"metadata": ' + b"[" * _DEEP + b"]" * _DEEP + b", " + data[1:]
        if kind == 5:
            return data[:1] + b'"tools": ' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b", " + data[1:]
        if kind == 6:
            return data[:1] + b'"seed": ' + b"9" * 5000 + b", " + data[1:]
        if kind == 7:
            return data[:1] + b'"user": "\\ud800\\udbff", "stop": "\\udc00", ' + data[1:]
        return b"[" * _DEEP + data


def answer_problem(status: int, content_type: str, answer: bytes) -> str:
    """The fault of an answer, whatever the request was; "" where there is none."""
    if status >= 500:
        return f"status {status}"
    if content_type.startswith("text/event-stream"):
        last = [event for event in answer.split(b"\n\n") if event][-1]
        ended = last == b"data: [DONE]" or last.startswith(b"event: response.")
        return "" if status == 200 and ended else "a stream without an end"
    try:
        body = json.loads(answer)
    except ValueError:
        return "an answer that is no JSON"
    if status == 200:
        return "" if isinstance(body, dict) and "error" not in {k for k, v in body.items() if v} else "no answer"
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return "an error of another shape"
    return "" if len(error["message"]) > 10 else "an error that says nothing"


HANG_S = 60.0
#: Allocators keep what they once had; a leak of one small body a case would be more.
GROWTH_BYTES = 64 << 20


@dataclass
class Findings:
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    num_unsendable: int = 0


async def send(session: aiohttp.ClientSession, url: str, case: Case, found: Findings) -> None:
    start = time.monotonic()
    headers = {"content-type": "application/json", **case.headers}
    try:
        async with asyncio.timeout(HANG_S):
            async with session.post(url + case.path, data=case.body, headers=headers) as response:
                answer = await response.read()
                problem = answer_problem(response.status, response.content_type, answer)
                found.statuses[str(response.status)] += 1
    except ValueError:  # a header that the client does not send
        found.num_unsendable += 1
        return
    except TimeoutError:
        problem, answer = f"no answer in {HANG_S:g} s", b""
    except aiohttp.ClientError as error:
        problem, answer = f"a broken connection: {error}", b""
    found.slowest_s = max(found.slowest_s, time.monotonic() - start)
    if problem:
        body = case.body[:2000].decode("utf-8", "replace")
        found.problems.append(
            {
                "problem": problem,
                "path": case.path,
                "body": body,
                "answer": answer[:500].decode("utf-8", "replace"),
            }
        )


async def run_cases(url: str, fuzzer: Fuzzer, count: int, concurrency: int, found: Findings) -> None:
    remaining = iter(range(count))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in remaining:
            await send(session, url, fuzzer.case(), found)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work(session))


async def check_valid(url: str) -> list[str]:
    """Faults in the answers to valid requests."""
    wrong = []
    async with aiohttp.ClientSession() as session:
        for path, body in valid_bodies():
            async with session.post(url + path, json=body) as response:
                problem = answer_problem(response.status, response.content_type, await response.read())
                if problem or response.status != 200:
                    wrong.append(f"{path}: {response.status} {problem}")
    return wrong


def sizes_bytes() -> dict[int, int]:
    """Resident memory of each process of the deployment."""
    sizes = {}
    for process in psutil.Process().children(recursive=True):
        try:
            sizes[process.pid] = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return sizes


async def fuzz(count: int, concurrency: int, seed: int) -> dict[str, Any]:
    config = DeploymentConfig(
        topology="EP-D",
        gateway={"port": 0, "media": {"allow_private": True}},
        # a pool so small that the first tenth of the cases has touched all of it
        instances={"base_port": 0, "threads": 1, "max_model_len": 512, "num_blocks": 256},
    )
    found, fuzzer, start = Findings(), Fuzzer(seed), time.monotonic()
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        wrong_before = await check_valid(deployment.gateway_url)
        warm = count // 10
        await run_cases(deployment.gateway_url, fuzzer, warm, concurrency, found)
        before = sizes_bytes()
        await run_cases(deployment.gateway_url, fuzzer, count - warm, concurrency, found)
        held = await held_in(deployment)
        after = sizes_bytes()
        wrong_after = await check_valid(deployment.gateway_url)
    growth = {str(pid): after[pid] - size for pid, size in before.items() if pid in after}
    return {
        "command": f"python -m benchmarks.fuzz --cases {count} --concurrency {concurrency} --seed {seed}",
        "machine": machine(),
        "cases": count,
        "seconds": round(time.monotonic() - start, 1),
        "statuses": dict(sorted(found.statuses.items())),
        "unsendable": found.num_unsendable,
        "slowest_s": round(found.slowest_s, 2),
        "problems": found.problems[:50],
        "num_problems": len(found.problems),
        "valid_requests_wrong": [*wrong_before, *wrong_after],
        "still_in_use": held,
        "processes_lost": len(set(before) - set(after)),
        "growth_bytes": growth,
        "growth_limit_bytes": GROWTH_BYTES,
    }


def is_clean(result: dict[str, Any]) -> bool:
    return (
        result["num_problems"] == 0
        and not result["valid_requests_wrong"]
        and not result["still_in_use"]
        and result["processes_lost"] == 0
        and max(result["growth_bytes"].values(), default=0) <= result["growth_limit_bytes"]
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = asyncio.run(fuzz(options.cases, options.concurrency, options.seed))
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    raise SystemExit(0 if is_clean(result) else 1)


if __name__ == "__main__":
    main()
