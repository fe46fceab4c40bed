"""The suite ``load``: bursts, storms of cancellations and slow readers; nothing is lost, nothing is kept."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter

from epd_serve.verify.check import Failed, Skipped, check, require
from epd_serve.verify.client import Client
from epd_serve.verify.items import asked, picture

#: Seconds for each request of a burst.
_BURST_S = 240.0


async def _burst(client: Client, number: int) -> str:
    began_s = time.monotonic()
    colors = [(index * 37 % 256, index * 91 % 256, index % 256) for index in range(number)]
    bodies = [client.body(asked(picture(color)), max_tokens=4) for color in colors]
    replies = await asyncio.gather(*(client.post(body, patient=False, timeout_s=_BURST_S) for body in bodies))
    lost: Counter[str] = Counter()
    for body, reply in zip(bodies, replies, strict=True):
        try:
            if reply.is_busy:
                reply.error()
            else:
                require(bool(reply.text()), "a 200 with an empty text")
        except Failed as failure:
            lost[str(failure)] += 1
            client.last = (client.last[0], body)
    require(not lost, f"{lost.total()} of {number} lost: {lost.most_common(3)}")
    busy = sum(reply.is_busy for reply in replies)
    require(busy < number, f"all {number} were refused")
    return f"{number - busy} answered, {busy} refused as too many, in {time.monotonic() - began_s:.1f} s"


@check("load", "sglang 23082: 150 of 200 requests lost in a burst", limit_s=270)
async def burst_200(client: Client) -> str:
    """Each of 200 picture requests at once is answered, or refused by a clean 429 or 503."""
    return await _burst(client, max(1, round(200 * client.scale)))


@check("load", "sglang 23082: 150 of 200 requests lost in a burst", limit_s=270)
async def burst_500(client: Client) -> str:
    """Each of 500 picture requests at once is answered, or refused by a clean 429 or 503."""
    return await _burst(client, max(1, round(500 * client.scale)))


@check("load", "KV blocks and load counters that leak on a disconnect", limit_s=90)
async def cancel_storm(client: Client) -> None:
    """After 60 clients went away, at once or in mid-stream, the answer is as before and nothing is held."""
    before, endless = (await client.chat(asked(picture()))).text(), await client.endless()
    for turn in range(3):
        contents = [asked(picture((turn, index, 9))) for index in range(20)]
        bodies = [client.body(one, stream=True, max_tokens=100, **endless) for one in contents]
        exchanges = [client.begin(body, asyncio.Event()) for body in bodies]
        await asyncio.sleep(0.15 * turn)
        for exchange in exchanges:
            exchange.close()
    require((await client.chat(asked(picture()))).text() == before, "another answer than before")
    await client.balanced()


@check("load", "a client that reads slowly holds up all others", limit_s=60)
async def slow_reader(client: Client) -> None:
    """A client that does not read its stream holds up no other."""
    if client.target.tls is not None:
        raise Skipped("only over plain HTTP")
    body = client.body(stream=True, max_tokens=200, **await client.endless())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {client.target.host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    lazy = socket.socket(socket.AF_INET6 if ":" in client.target.address else socket.AF_INET)
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    with lazy:
        await asyncio.to_thread(lazy.connect, (client.target.address, client.target.port))
        lazy.sendall(head.encode() + body)
        await asyncio.to_thread(lazy.recv, 1)
        began_s = time.monotonic()
        require(bool((await client.chat()).text()), "an empty text")
        limit_s = client.within(20)
        require(time.monotonic() - began_s < limit_s, f"others wait more than {limit_s:g} s")


@check("load", "leaked KV blocks, leaked load counters", limit_s=40)
async def books(client: Client) -> None:
    """An idle server's metrics say that it holds nothing."""
    (await client.chat(asked(picture()))).choices()
    await client.balanced()
