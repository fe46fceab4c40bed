"""A server with known faults and delays, for testers. Run it: it prints its port, and ends with its stdin.

What a chat's last message names is done; what "hold NAME" asks for waits until somebody has got /release/NAME.
GET /log says when, by the clock of CLOCK_MONOTONIC, which is the same in every process of a host: when a request
was there in whole, and when each event left.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

FIRST_S, GAP_S, STALL_S, NUM_TOKENS = 0.4, 0.01, 0.3, 8
USAGE = {"prompt_tokens": 12, "completion_tokens": NUM_TOKENS, "total_tokens": 12 + NUM_TOKENS}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Call:
    """One request and what was sent for it."""

    writer: asyncio.StreamWriter
    id: str
    script: str
    text: str = ""
    received: float = field(default_factory=time.perf_counter)
    events: list[float] = field(default_factory=list)
    due: float = 0.0

    async def wait(self, seconds: float) -> None:
        self.due = (self.due or self.received) + seconds
        await asyncio.sleep(max(0.0, self.due - time.perf_counter()))

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    def event(self, data: bytes) -> None:
        self.events.append(time.perf_counter())
        self.raw(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def chunk(self, content: str | None = None, finish: str | None = None, **delta: Any) -> None:
        if content is not None:
            delta["content"] = content
        self.event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode())

    def usage(self) -> None:
        self.event(json.dumps({"choices": [], "usage": USAGE}).encode())

    def end(self, *, done: bool = True) -> None:
        if done:
            self.event(b"[DONE]")
        self.raw(b"0\r\n\r\n")

    def plain(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.raw(
            b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind.encode(), len(body))
        )
        self.raw(body)

    async def tokens(self, count: int, *, finish: bool = True, stall_behind: int = -1) -> None:
        await self.wait(FIRST_S)
        for index in range(count):
            if index:
                await self.wait(STALL_S if index == stall_behind else GAP_S)
            self.chunk(f" t{index}", "length" if finish and index == count - 1 else None)


async def stream(
    call: Call,
    count: int = NUM_TOKENS,
    *,
    opens: str = "",
    finish: bool = True,
    stall_behind: int = -1,
    events: Sequence[bytes] = (),
    usage: bool = False,
    done: bool = True,
    cut: bool = False,
) -> None:
    """A stream with ``opens`` before its tokens and ``events`` behind them; with ``cut`` its connection breaks."""
    call.raw(_HEAD)
    if opens == "role":
        call.chunk(content="", role="assistant")
    elif opens == "comment":
        call.raw(b"e\r\n: keep-alive\n\n\r\n")
    if count:
        await call.tokens(count, finish=finish, stall_behind=stall_behind)
    for event in events:
        call.event(event)
    if usage:
        call.usage()
    if cut:
        await call.writer.drain()
        call.writer.transport.abort()
    else:
        call.end(done=done)


async def no_stream(call: Call) -> None:
    call.plain(200, b'{"choices":[{"message":{"content":"whole"}}]}')


async def refused(call: Call) -> None:
    call.plain(400, b'{"error":{"message":"max_tokens is too large"}}')


async def overloaded(call: Call) -> None:
    await call.wait(0.05)
    call.plain(503, b"try later", "text/plain")


async def reset(call: Call) -> None:
    await call.wait(0.05)
    call.writer.transport.abort()


async def hang(call: Call) -> None:
    call.raw(_HEAD)
    await call.tokens(2, finish=False)
    await asyncio.sleep(3600)


async def hold(call: Call) -> None:
    await _GATES.setdefault(call.text.split()[1], asyncio.Event()).wait()
    await stream(call, usage=True)


async def no_http(call: Call) -> None:
    call.raw(b"SSH-2.0-OpenSSH_9.6\r\n")


_STOP = b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'
_DIED = b'{"error":{"message":"the decode instance died","type":"server_error"}}'
SCRIPTS: dict[str, Callable[[Call], Awaitable[None]]] = {
    "steady": partial(stream, usage=True),
    "stall": partial(stream, usage=True, stall_behind=4),
    "early_role": partial(stream, usage=True, opens="role"),
    "keep_alive_comments": partial(stream, usage=True, opens="comment"),
    "no_usage": stream,
    "no_done": partial(stream, done=False),
    "no_finish_reason": partial(stream, count=3, finish=False),
    "clean_end": partial(stream, count=3, finish=False, done=False),  # a short answer that ends like a whole one
    "cut": partial(stream, count=3, finish=False, cut=True),
    "in_stream_error": partial(stream, count=3, finish=False, events=[_DIED], cut=True),
    # dressed up as a success
    "error_then_done": partial(
        stream, count=3, finish=False, events=[b'{"error":{"message":"out of blocks"}}', _STOP]
    ),
    "no_tokens": partial(stream, count=0, opens="role", events=[_STOP]),
    "malformed": partial(stream, count=2, finish=False, events=[b'{"choices": [{"delta"']),
    **{one.__name__: one for one in (no_stream, refused, overloaded, reset, hang, hold, no_http)},
}
_LOG: list[dict[str, Any]] = []
_GATES: dict[str, asyncio.Event] = {}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = lines[0].split()[1]
            if path.startswith("/release/"):
                _GATES.setdefault(path.removeprefix("/release/"), asyncio.Event()).set()
                Call(writer, "", "").plain(200, b"{}")
                continue
            if path != "/v1/chat/completions":
                answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "scripted"}]}, "/log": _LOG}
                call = Call(writer, "", "")
                call.plain(200 if path in answers else 404, json.dumps(answers.get(path)).encode())
                continue
            content = json.loads(body)["messages"][-1]["content"]
            script = content if isinstance(content, str) else content[-1]["text"]
            call = Call(writer, headers.get("x-request-id", ""), script.split()[0], script)
            messages = json.loads(body)["messages"] if len(body) < 10_000 else []
            entry = {"id": call.id, "script": call.script, "messages": messages}
            _LOG.append({**entry, "received": call.received, "events": call.events})
            await SCRIPTS[call.script](call)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        runner.run(_main())
