"""The suite ``media``: the server refuses hostile media and URLs and keeps serving."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from epd_serve.verify.check import check, require
from epd_serve.verify.client import Client
from epd_serve.verify.items import asked, part, picture, sound, url_part

#: Seconds for the refusal of a hostile item.
REFUSED_S = 20.0


async def _check_refused(client: Client, items: dict[str, Any]) -> None:
    for name, item in items.items():
        reply = await client.post(client.body(asked(item)), timeout_s=REFUSED_S)
        require(bool(reply.status), f"{name}: {reply.failure}")
        require(400 <= reply.status < 500, f"{name}: status {reply.status}")
        reply.error()
    reply = await client.chat(asked(picture()))
    require(bool(reply.text()), "a valid picture gets no text afterwards")


def _png(width: int, height: int, rows: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes((width + 1) * rows)))
        + chunk(b"IEND", b"")
    )


@check("media", "out of memory from decoding pictures to find their size", limit_s=120)
async def bombs(client: Client) -> None:
    """Pictures of billions of pixels in a few bytes get a 4xx within 20 s."""
    await _check_refused(
        client,
        {"100,000 x 100,000": part(_png(100_000, 100_000, 1)), "2**31 - 1 wide": part(_png(2**31 - 1, 1, 0))},
    )


@check("media", "invalid media answered by a 500", limit_s=120)
async def broken(client: Client) -> None:
    """Random bytes, truncated pictures and invalid base64 get a 4xx."""
    whole = _png(64, 64, 64)
    await _check_refused(
        client,
        {
            "random bytes": part(b"no picture"),
            "an empty file": part(b""),
            "a truncated picture": part(whole[: len(whole) // 2]),
            "invalid base64": url_part("data:image/png;base64,!!!"),
            "an empty data URL": url_part("data:"),
        },
    )


@check("media", "endless or mislabelled clips that block a decoder", limit_s=120)
async def clips(client: Client) -> None:
    """Invalid, truncated and mislabelled videos and sounds get a 4xx."""
    mp4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + b"\x00\x00\x00\x08mdat"
    whole = sound(440)["input_audio"]["data"]
    await _check_refused(
        client,
        {
            "random bytes as a video": part(b"no video", "video/mp4"),
            "an empty video": part(b"", "video/mp4"),
            "a video without frames": part(mp4, "video/mp4"),
            "a sound as a video": part(base64.b64decode(whole), "video/mp4"),
            "random bytes as a sound": part(b"no sound", "audio/wav"),
            "an empty sound": part(b"", "audio/wav"),
            "a picture as a sound": part(_png(8, 8, 8), "audio/wav"),
            "a truncated sound": part(base64.b64decode(whole)[:40], "audio/wav"),
        },
    )


@check("media", "server-side requests to private addresses", limit_s=120)
async def urls(client: Client) -> None:
    """File URLs, other schemes and the cloud metadata address get a 4xx."""
    await _check_refused(
        client,
        {
            "a file": url_part("file:///etc/passwd"),
            "ftp": url_part("ftp://127.0.0.1/a.png"),
            "gopher": url_part("gopher://127.0.0.1:70/"),
            "no host": url_part("http:///a.png"),
            "the metadata address": url_part("http://169.254.169.254/latest/meta-data/"),
        },
    )


@asynccontextmanager
async def _serving(answer: bytes) -> AsyncIterator[int]:
    """Serve ``answer`` on the loopback interface, without ending it; yield the port."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(4096)
        writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()


@check("media", "redirects into private ranges", limit_s=120)
async def redirects(client: Client) -> None:
    """Redirects to a file, to themselves or to the metadata address get a 4xx."""
    for place in ("file:///etc/passwd", "http://169.254.169.254/", "/again"):
        head = f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        async with _serving(head.encode()) as port:
            await _check_refused(client, {f"redirect to {place}": url_part(f"http://127.0.0.1:{port}/a.png")})


@check("media", "a slow media server that blocks a request for ever", limit_s=120)
async def slow_server(client: Client) -> None:
    """A media server that never finishes delays no other request and is abandoned."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n\x89PNG"
    async with _serving(head) as port:
        slow = asyncio.create_task(
            client.post(client.body(asked(url_part(f"http://127.0.0.1:{port}/a.png"))), timeout_s=90)
        )
        await asyncio.sleep(0.2)
        require(bool((await client.chat(asked(picture()))).text()), "a slow media server delays other requests")
        reply = await slow
    require(400 <= reply.status < 600, f"not abandoned within 90 s: {reply.failure}")
