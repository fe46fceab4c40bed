"""Connections on an event loop that stands still for long, as one does that reads a burst of bodies."""

import asyncio
import socket
import time

import pytest
import uvloop

from epd_serve.rpc.sockets import connect


async def _connect_many(count):
    with socket.create_server(("127.0.0.1", 0), backlog=2 * count) as listener:
        is_busy = True

        async def stand_still():
            while is_busy:
                time.sleep(0.6)  # noqa: ASYNC251 - that is what stands still
                await asyncio.sleep(0)

        busy = asyncio.create_task(stand_still())
        made = await asyncio.gather(
            *(connect(*listener.getsockname()) for _ in range(count)), return_exceptions=True
        )
        is_busy = False
        await busy
        return made


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_stands_still_loses_no_connection(run):
    """With uvloop all of them were lost: a connection took more turns of the loop than there is time for."""
    made = run(_connect_many(50))
    for one in made:
        assert isinstance(one, socket.socket), one
        one.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nobody_there_is_told_at_once(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        run(connect(*address))
