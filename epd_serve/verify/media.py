"""The suite ``media``: hostile pictures and URLs are refused, and the server goes on."""

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

#: Seconds within which a hostile item has to be refused.
REFUSED_S = 20.0


async def _refused(client: Client, items: dict[str, Any]) -> None:
    for name, item in items.items():
        reply = await client.post(client.body(asked(item)), timeout_s=REFUSED_S)
        require(bool(reply.status), f"{name}: {reply.failure}")
        require(400 <= reply.status < 500, f"{name}: status {reply.status}")
        reply.error()
    reply = await client.chat(asked(picture()))
    require(bool(reply.text()), "afterwards a good picture gets no text")


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


@check("media", "whole pictures decoded to learn their size: out of memory", limit_s=120)
async def bombs(client: Client) -> None:
    """Pictures of billions of pixels in a few bytes are refused by a 4xx in 20 s."""
    await _refused(
        client,
        {"100,000 x 100,000": part(_png(100_000, 100_000, 1)), "2**31 - 1 wide": part(_png(2**31 - 1, 1, 0))},
    )


@check("media", "failures turned into 500s", limit_s=120)
async def broken(client: Client) -> None:
    """Bytes that are no picture, cut pictures, and wrong base64 are refused by a 4xx."""
    whole = _png(64, 64, 64)
    await _refused(
        client,
        {
            "no picture": part(b"no picture"),
            "nothing": part(b""),
            "a cut picture": part(whole[: len(whole) // 2]),
            "wrong base64": url_part("data:image/png;base64,!!!"),
            "no data URL": url_part("data:"),
        },
    )


@check("media", "endless or mislabelled clips that a decoder waits for", limit_s=120)
async def clips(client: Client) -> None:
    """Videos and sounds that are none, cut ones, and those of another kind than they say are refused by a 4xx."""
    mp4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + b"\x00\x00\x00\x08mdat"
    whole = sound(440)["input_audio"]["data"]
    await _refused(
        client,
        {
            "no video": part(b"no video", "video/mp4"),
            "an empty video": part(b"", "video/mp4"),
            "a video without frames": part(mp4, "video/mp4"),
            "a sound as a video": part(base64.b64decode(whole), "video/mp4"),
            "no sound": part(b"no sound", "audio/wav"),
            "an empty sound": part(b"", "audio/wav"),
            "a picture as a sound": part(_png(8, 8, 8), "audio/wav"),
            "a sound's head": part(base64.b64decode(whole)[:40], "audio/wav"),
        },
    )


@check("media", "server-side requests to private addresses", limit_s=120)
async def urls(client: Client) -> None:
    """URLs of files, other schemes and the cloud's metadata address are refused by a 4xx."""
    await _refused(
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
async def _listening(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on the loopback that sends ``answer`` and nothing more: its port, and what it was asked."""
    heard: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        heard.append(await reader.read(4096))
        writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()


@check("media", "redirects into private ranges", limit_s=120)
async def redirects(client: Client) -> None:
    """A server that redirects to a file, to itself or to the metadata address is no picture: a 4xx."""
    for place in ("file:///etc/passwd", "http://169.254.169.254/", "/again"):
        head = f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        async with _listening(head.encode()) as (port, _):
            await _refused(client, {f"redirect to {place}": url_part(f"http://127.0.0.1:{port}/a.png")})


@check("media", "a slow media server that holds a request for ever", limit_s=120)
async def slow_server(client: Client) -> None:
    """A media server that never ends its answer does not keep others from theirs, and is given up."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n\x89PNG"
    async with _listening(head) as (port, _):
        slow = asyncio.create_task(
            client.post(client.body(asked(url_part(f"http://127.0.0.1:{port}/a.png"))), timeout_s=90)
        )
        await asyncio.sleep(0.2)
        require(bool((await client.chat(asked(picture()))).text()), "others wait for a slow media server")
        reply = await slow
    require(400 <= reply.status < 600, f"not given up in 90 s: {reply.failure}")
