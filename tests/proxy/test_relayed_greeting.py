"""A process at an instance's address that forwards greetings to another server proves nothing."""

import asyncio
import contextlib
from urllib.parse import urlsplit

import pytest
from gateway_settings import admin_plane
from servers import served

from epd_serve.errors import InstanceUntrusted
from epd_serve.rpc.link import Link
from epd_serve.rpc.messages import OPENING

KEY = "0123456789abcdef-"


class Relay:
    """Forwards what it hears to ``target``, with ``(from, to)`` of ``rewrite`` replaced; keeps what it heard."""

    target: str
    rewrite = b"", b""

    def __init__(self):
        self.heard = b""

    async def serve(self, reader, writer):
        target = urlsplit(self.target)
        from_target, to_target = await asyncio.open_connection(target.hostname, target.port)

        async def answer():
            while data := await from_target.read(65536):
                writer.write(data)

        answering = asyncio.create_task(answer())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard += data
                old, new = self.rewrite
                to_target.write(data.replace(old, new) if old else data)
        writer.close()
        to_target.close()
        await asyncio.gather(answering, return_exceptions=True)


@contextlib.asynccontextmanager
async def relaying(relay):
    """The URL of the relay while it listens."""
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def netloc(url):
    return urlsplit(url).netloc.encode()


@pytest.mark.parametrize("target", ["admin", "instance"])
@pytest.mark.parametrize("rewritten", [False, True])
async def test_at_the_port_of_a_crashed_instance(start, kit, target, rewritten):
    first = await start("good:EPD", "crashed:EPD")
    relay = Relay()
    async with contextlib.AsyncExitStack() as stack:
        crashed = await stack.enter_async_context(relaying(relay))
        good = await stack.enter_async_context(served(first["good"].server(KEY)))
        gateway = await start(admin=admin_plane(key="secret"), cluster_key=KEY)
        admin_url = gateway.app.state.admin_url
        relay.target = admin_url if target == "admin" else good
        if rewritten:
            relay.rewrite = b"instance " + netloc(crashed), target.encode() + b" " + netloc(relay.target)
        gateway.become([("good", good), ("crashed", crashed)])
        await gateway.until(lambda: gateway.table["good"].ready and relay.heard.count(OPENING) >= 2)
        assert not gateway.table["crashed"].ready
        answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(20)))
        assert answers == [(200, kit.WHOLE)] * 20
        assert len(relay.heard) < 200 * relay.heard.count(OPENING) and b"/stage" not in relay.heard


async def test_joining_is_not_relayed(start):
    """Who joins proves nothing to the admin plane at another address."""
    gateway = await start(admin=admin_plane(key="secret"), cluster_key=KEY)
    url = gateway.app.state.admin_url
    relay = Relay()
    relay.target = url
    async with relaying(relay) as through, Link("gateway", through, KEY, "admin") as link:
        with pytest.raises(InstanceUntrusted, match="a proxy in between"):
            await link.ask("/leave", [b'{"name":"good","url":"http://10.0.0.1:1"}'])
    assert b"/leave" not in relay.heard
