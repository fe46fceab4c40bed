"""A chat server whose times are known: ``python -m benchmarks.tester.paced``; it prints its port.

Request number n (from 0, anew after GET /reset) gets its first token after FIRST_S[n % len(FIRST_S)] and 64 tokens
at GAP_S[n % len(GAP_S)], by absolute times, so that a late event makes no later one late. GET /truth: what the
server itself saw since then, from a request's last byte to the leaving of its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from statistics import mean, median
from typing import Any

FIRST_S = (0.4, 0.2, 0.6, 0.3, 0.5)
GAP_S = (0.01, 0.02, 0.015)
NUM_TOKENS, NUM_PROMPT_TOKENS = 64, 32
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_COMMON = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1750000000, "model": "paced"}


class _Server:
    def __init__(self) -> None:
        self._number = 0
        self._ttft_ms: list[float] = []
        self._tpot_ms: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                await reader.readexactly(int(headers.get("content-length", 0)))
                path = head[0].split()[1]
                if path.endswith("/chat/completions"):
                    await self._chat(writer)
                    continue
                answer: dict[str, Any] = {"object": "list", "data": [{"id": "paced", "object": "model"}]}
                if path == "/reset":
                    self._number, self._ttft_ms, self._tpot_ms = 0, [], []
                elif path == "/truth":
                    answer = self._truth()
                known = path in ("/reset", "/truth", "/v1/models", "/health")
                body = json.dumps(answer).encode()
                status = "200 OK" if known else "404 Not Found"
                kind = f"content-type: application/json\r\ncontent-length: {len(body)}"
                writer.write(f"HTTP/1.1 {status}\r\n{kind}\r\n\r\n".encode() + body)
        writer.close()

    def _truth(self) -> dict[str, float]:
        return {
            "mean_ttft_ms": mean(self._ttft_ms),
            "median_ttft_ms": median(self._ttft_ms),
            "mean_tpot_ms": mean(self._tpot_ms),
            "median_tpot_ms": median(self._tpot_ms),
        }

    async def _chat(self, writer: asyncio.StreamWriter) -> None:
        received = time.perf_counter()
        due = received + FIRST_S[self._number % len(FIRST_S)]
        gap = GAP_S[self._number % len(GAP_S)]
        self._number += 1
        first = left = received
        writer.write(_HEAD)
        for index in range(NUM_TOKENS):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += gap
            left = time.perf_counter()
            if not index:
                first = left
            reason = "length" if index == NUM_TOKENS - 1 else None
            delta = {"content": " tok"} if index else {"role": "assistant", "content": " tok"}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            writer.write(_event({**_COMMON, "choices": [choice]}))
        self._ttft_ms.append(1e3 * (first - received))
        self._tpot_ms.append(1e3 * (left - first) / (NUM_TOKENS - 1))
        total = NUM_PROMPT_TOKENS + NUM_TOKENS
        usage = {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": NUM_TOKENS, "total_tokens": total}
        writer.write(
            _event({**_COMMON, "choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        )


def _event(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _main() -> None:
    server = await asyncio.start_server(_Server().serve, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends


if __name__ == "__main__":
    asyncio.run(_main())
