"""Fetches pictures where most names have no answer; run by test_lookups in namespaces of its own. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import uvloop
from aiohttp import web
from gateway_settings import gateway_settings

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.messages import MediaSource
from proxy.media.fetch import MediaFetcher
from proxy.media.loader import MediaLoader


class NameServer(asyncio.DatagramProtocol):
    """Says 127.0.0.1 for A of good.example, that there is no AAAA, and nothing about other names."""

    def __init__(self) -> None:
        self.dead: set[bytes] = set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question = data[12:]
        name = question[: question.index(0) + 1]
        if name != b"\x04good\x07example\x00":
            self.dead.add(name)
            return
        asks_address = question[len(name) : len(name) + 2] == b"\x00\x01"
        header = data[:2] + b"\x81\x80\x00\x01" + (b"\x00\x01" if asks_address else b"\x00\x00") + bytes(4)
        answer = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x01\x00\x04\x7f\x00\x00\x01" if asks_address else b""
        self.transport.sendto(header + question[: len(name) + 4] + answer, addr)


async def main() -> None:
    loop = asyncio.get_running_loop()
    _, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 53))

    async def picture(_: web.Request) -> web.Response:
        return web.Response(body=b"picture")

    application = web.Application()
    application.router.add_get("/x.png", picture)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 80).start()

    seen: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    settings = gateway_settings(media={})
    async with MediaFetcher(settings) as fetcher:
        loader = MediaLoader(settings, fetcher)

        async def load_dead(name: str, key: str) -> None:
            urls = [MediaSource(url=f"http://dead-{name}-{i}.example/x.png", param="") for i in range(60)]
            try:
                await loader.load(urls)
            except InvalidRequest as error:
                seen[name] = type(error).__name__

        async def timed(name: str, url: str, key: str) -> None:
            start_s = time.monotonic()
            seen[name] = (await fetcher.fetch(url)).decode()
            seconds[name] = round(time.monotonic() - start_s, 2)

        dead = [loop.create_task(load_dead("dead", "a")), loop.create_task(load_dead("dead again", "a"))]
        while len(server.dead) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await timed("another's name", "http://good.example/x.png", "b")
        await timed("another's literal", "http://127.0.0.1/x.png", "b")
        await timed("own literal", "http://127.0.0.1/x.png", "a")
        await timed("own name", "http://good.example/x.png", "a")
        start_s = time.monotonic()
        [found, *_] = await loop.getaddrinfo("good.example", 80, type=socket.SOCK_STREAM)
        seen["an instance's name"] = found[4][0]
        seconds["an instance's name"] = round(time.monotonic() - start_s, 2)
        await asyncio.gather(*dead)
    seen["asked for dead names"] = len(server.dead)
    print(json.dumps(seen | {"seconds": seconds}))


uvloop.run(main())
