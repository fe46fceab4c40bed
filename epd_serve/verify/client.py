"""Send the checks' requests and parse answers strictly by OpenAI's specification."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp

from epd_serve.bench.client import model_names, open_session
from epd_serve.verify.check import Failed, Skipped, Unjudged, require

CHAT = "/v1/chat/completions"
#: Total time that one request waits for a rate limit.
_PATIENCE_S = 20.0
#: With less than this many nats between the two likeliest tokens, rounding may choose either.
_TIE = 0.05
#: Gauges with value 0 in an idle server: ours, vLLM's, SGLang's and Dynamo's.
_IDLE_GAUGES = (
    "epd_serve_num_requests_running",
    "epd_serve_num_requests_waiting",
    "epd_serve_in_flight_calls",
    "epd_serve_instance_requests",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_used_tokens",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_queued_requests",
)
#: Time for an idle server to release resources; leases of dead parts take longer.
SETTLE_S, LEASES_S = 15.0, 45.0
#: A line of Prometheus's text format: name with labels, value.
_SAMPLE = re.compile(r'^([a-zA-Z_:][\w:]*(?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?)\s+(\S+)', re.MULTILINE)


@dataclass(eq=False)
class Reply:
    """One answer, filled while it arrives.

    Attributes:
        status: HTTP status; 0 before the response's head.
        failure: why the answer is incomplete; "" if it is complete.
        timed_out: whether the request ran out of time.
        is_over: whether the request has ended.
        first_s: time.monotonic() of the body's first bytes.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    failure: str = ""
    timed_out: bool = False
    is_over: bool = False
    first_s: float | None = None

    @property
    def complete(self) -> bool:
        """True if the body ended by HTTP's rules."""
        return self.status != 0 and not self.failure

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def done(self) -> bool:
        """True for a stream that ended with [DONE]."""
        return self.is_stream and self.body.endswith(b"data: [DONE]\n\n")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The payloads of a finished stream's events, without ``[DONE]``."""
        parts = self.body.split(b"\n\n")[:-1] if self.is_stream else []
        for part in parts:
            require(part.startswith(b"data: ") and b"\n" not in part, f"not an event 'data: ...': {part[:80]!r}")
        require(b"data: [DONE]" not in parts[:-1], "an event after [DONE]")
        return [_parse_object(part[6:]) for part in parts if part != b"data: [DONE]"]

    @property
    def is_busy(self) -> bool:
        return self.status in (429, 503)

    def json(self) -> dict[str, Any]:
        return _parse_object(self.body)

    def error(self) -> str:
        """Return the error message. Raises Failed for a body without OpenAI's error object."""
        error = self.json().get("error")
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            raise Failed("the body lacks error.message")
        return str(error["message"])

    def choices(self) -> list[Any]:
        """Return the choices; those of a stream are assembled."""
        said = self.failure if not self.status else self.body[:200].decode("utf-8", "replace")
        require(self.status == 200, f"status {self.status}: {said}")
        require(self.complete, f"the body was cut: {self.failure}")
        if not self.is_stream:
            choices = self.json().get("choices")
            if not isinstance(choices, list) or not choices:
                raise Failed("the answer lacks choices")
            return choices
        require(not any("error" in event for event in self.events), "an error in the stream")
        require(self.done, "the stream ended without [DONE]")
        found: dict[int, dict[str, Any]] = {}
        for event in self.events:
            for one in event["choices"]:
                choice = found.setdefault(
                    one["index"],
                    {"index": one["index"], "message": {"content": ""}, "finish_reason": None, "logprobs": None},
                )
                require(choice["finish_reason"] is None, "a delta after finish_reason")
                choice["message"]["content"] += one["delta"].get("content") or ""
                for call in one["delta"].get("tool_calls") or ():
                    _join(choice["message"].setdefault("tool_calls", []), call)
                choice["finish_reason"] = one.get("finish_reason")
                if one.get("logprobs"):
                    choice["logprobs"] = choice["logprobs"] or {"content": []}
                    choice["logprobs"]["content"] += one["logprobs"]["content"] or []
        return [found[index] for index in sorted(found)]

    def text(self) -> str:
        content = self.choices()[0]["message"]["content"]
        if not isinstance(content, str):
            raise Failed("message.content is not a text")
        return content

    def usage(self) -> dict[str, int]:
        """Return the three counts; details such as cached tokens may differ between equal requests."""
        holder = self.events[-1] if self.is_stream else self.json()
        usage = holder.get("usage")
        if not isinstance(usage, dict):
            raise Failed("the answer lacks usage")
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        for name in names:
            require(type(usage.get(name)) is int, f"usage.{name} is not an integer")
        return {name: usage[name] for name in names}


class Client:
    """The server under test, with an optional reference server.

    Attributes:
        last: path and body of the last request, for the curl line.
        reference: a monolithic server of the same model.
        admin: shell commands by name, such as ``kill-E``.
        slowness: factor on all time limits.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        reference: Client | None = None,
        record: Path | None = None,
        admin: dict[str, str] | None = None,
        slowness: float = 1.0,
    ) -> None:
        # some servers close a connection after an error without announcing it
        self._http = open_session(url, api_key, force_close=True)
        self.url = url.rstrip("/")
        self.model, self.reference, self.admin = model, reference, admin or {}
        self.slowness = slowness
        self._has_key, self._record = api_key is not None, record
        self._answers: dict[str, Any] = json.loads(record.read_text()) if record and record.exists() else {}
        self._endless: dict[str, Any] | None = None
        self.last: tuple[str, bytes] = ("", b"")

    async def meet(self) -> None:
        """Ask for the model's name. Raises ValueError if no server answers or none lists a model."""
        names = await model_names(self._http, self.url)
        if not self.model and not names:
            raise ValueError(f"{self.url}/v1/models lists no model; name one with --model, or another server")
        self.model = self.model or names[0]
        if self.reference is not None:
            await self.reference.meet()

    async def close(self) -> None:
        await self._http.close()
        if self.reference is not None:
            await self.reference.close()

    async def get(self, path: str) -> Reply:
        self.last, reply = (path, b""), Reply()
        await self.send(reply, None, path, 20.0)
        return reply

    async def post(self, body: bytes, path: str = CHAT, *, timeout_s: float = 60.0) -> Reply:
        """Send a body; retry while the server is busy, for _PATIENCE_S in total."""
        self.last, waited_s = (path, body), 0.0
        while True:
            await self.send(reply := Reply(), body, path, timeout_s)
            if not reply.is_busy or waited_s >= _PATIENCE_S:
                return reply
            after = reply.headers.get("retry-after", "")
            pause_s = max(0.1, float(after)) if after.isdecimal() else 1.0  # else a date
            await asyncio.sleep(min(pause_s, _PATIENCE_S - waited_s))
            waited_s += pause_s

    async def send(self, reply: Reply, body: bytes | None, path: str = CHAT, timeout_s: float = 60.0) -> None:
        """POST a body, or GET without one, and fill ``reply`` while the answer arrives. Cancelling disconnects."""
        limit_s, url = timeout_s * self.slowness, self.url + path
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                reply.status, reply.headers = response.status, response.headers
                async for piece in response.content.iter_any():
                    reply.first_s = reply.first_s or time.monotonic()
                    reply.body += piece
        except TimeoutError:
            reply.failure, reply.timed_out = f"not finished within {limit_s:g} s", True
        except (aiohttp.ClientError, OSError) as error:
            reply.failure = str(error) or type(error).__name__
        finally:
            reply.is_over = True

    def body(self, content: Any = "What colours are there?", **fields: Any) -> bytes:
        """Encode a chat of one user message, greedy and short by default; ``...`` omits a field."""
        messages = [{"role": "user", "content": content}]
        chat = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        return json.dumps({name: value for name, value in chat.items() if value is not ...}).encode()

    async def chat(self, content: Any = "What colours are there?", **fields: Any) -> Reply:
        return await self.post(self.body(content, **fields))

    async def endless(self) -> dict[str, Any]:
        """Return fields that make an answer last until max_tokens: vLLM's, or none if they are unknown."""
        if self._endless is None:
            fields = {"ignore_eos": True, "skip_special_tokens": False}
            is_known = (await self.chat(max_tokens=1, **fields)).status == 200
            self._endless = fields if is_known else {}
        return self._endless

    async def max_model_len(self) -> int:
        """Return the most tokens of a prompt and its answer. Raises Skipped if the server does not report it."""
        listed = (await self.get("/v1/models")).json()["data"]
        length = next((one.get("max_model_len") for one in listed if one.get("id") == self.model), None)
        if not isinstance(length, int):
            raise Skipped("the server reports no max_model_len")
        return length

    async def expected(self, content: Any, **fields: Any) -> Any:
        """Return the reference's first choice. Raises Unjudged without a reference."""
        named = json.dumps([content, fields], sort_keys=True)
        key = hashlib.sha256(named.encode()).hexdigest()
        if self.reference is not None and key not in self._answers:
            self._answers[key] = (await self.reference.chat(content, **fields)).choices()[0]
            if self._record is not None:
                self._record.write_text(json.dumps(self._answers))
        if key not in self._answers:
            raise Unjudged("no reference; give --reference or --record")
        return self._answers[key]

    async def metrics(self) -> dict[str, float]:
        reply = await self.get("/metrics")
        if reply.status != 200:
            raise Skipped(f"/metrics: status {reply.status}")
        return {name: float(value) for name, value in _SAMPLE.findall(reply.body.decode())}

    async def wait_idle(self, settle_s: float = SETTLE_S) -> None:
        """Wait until all _IDLE_GAUGES are 0. Raises Failed in the end, Unjudged without such metrics."""
        settle_s *= self.slowness
        end_s = time.monotonic() + settle_s
        while True:
            samples = await self.metrics()
            seen = {name: value for name, value in samples.items() if name.split("{")[0] in _IDLE_GAUGES}
            if not seen:
                raise Unjudged("no metric shows whether the server released its resources")
            held = {name: value for name, value in seen.items() if value}
            if not held:
                return
            if time.monotonic() > end_s:
                raise Failed(f"{settle_s:g} s after the last request: {held}")
            await asyncio.sleep(0.2)

    def curl(self, directory: Path, name: str) -> str:
        """Return the command that repeats the last request; its body is saved in ``directory``."""
        path, body = self.last
        line = f"curl -sN {shlex.quote(self.url + path)}"
        if not body:
            return line
        file = directory / f"{name}.body"
        file.write_bytes(body)
        key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if self._has_key else ""
        return f"{line}{key} -H 'Content-Type: application/json' --data-binary @{shlex.quote(str(file))}"


def _join(calls: list[Any], delta: Any) -> None:
    """Append a stream's delta to the tool calls so far."""
    if delta["index"] == len(calls):
        calls.append({"function": {"name": "", "arguments": ""}})
    for name in ("name", "arguments"):
        calls[delta["index"]]["function"][name] += delta["function"].get(name) or ""


def same(one: Any, other: Any, between: str) -> None:
    """Compare greedy choices. Raises Failed, or Unjudged if they diverge at two equally likely tokens."""
    if one["message"]["content"] == other["message"]["content"]:
        return
    mine, theirs = tokens_of(one), tokens_of(other)
    for left, right in zip(mine, theirs, strict=False):
        if left["token"] != right["token"]:
            likely = sorted((top["logprob"] for top in right.get("top_logprobs", ())), reverse=True)
            if len(likely) > 1 and likely[0] - likely[1] < _TIE:
                raise Unjudged(f"{between}: {left['token']!r} and {right['token']!r} are equally likely")
            break
    raise Failed(f"{between}: {one['message']['content']!r} instead of {other['message']['content']!r}")


def tokens_of(choice: Any) -> Sequence[Any]:
    """Return the tokens of a choice with their logprobs, if any."""
    return (choice.get("logprobs") or {}).get("content") or ()


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise Failed(f"invalid JSON: {data[:100]!r}") from None
    if not isinstance(found, dict):
        raise Failed(f"not a JSON object: {data[:100]!r}")
    return found
