"""``epd-serve instance``: serve one instance until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop

from epd_serve.config import InstanceOptions
from epd_serve.config.keys import admin_headers, cluster_key
from epd_serve.config.role_files import remembered
from epd_serve.errors import InstanceLost, ServeError
from epd_serve.instance.http import ControlHttp, control_server_app
from epd_serve.instance.instance import Instance
from epd_serve.instance.model import prepare_process
from epd_serve.protocol.addresses import NoBrowsers
from epd_serve.rpc.descriptors import raise_limit
from epd_serve.rpc.http import HttpCall, HttpPool
from epd_serve.rpc.sockets import watch_accepted
from epd_serve.rpc.stream_server import BrokenStream

logger = logging.getLogger(__name__)

#: Between two tries to reach a gateway that refuses connections.
_AGAIN_S = 0.2


class Joining:
    """At one gateway's admin plane.

    Args:
        name, url: of the instance.
        headers: that the admin plane asks for. key: of the cluster, if it has one; then that alone is proved.
        lease_s: after so long without a renewal the gateway takes it out. It is renewed three times as often; a
            renewal without an answer in a third of it is tried again at once.
    """

    def __init__(
        self,
        admin_url: str,
        name: str,
        url: str,
        headers: Mapping[str, str],
        *,
        key: str | None = None,
        lease_s: float = 10.0,
    ) -> None:
        self._gateway = HttpPool("gateway", admin_url, key)
        self._url = self._gateway.url + "/instances"
        self._body = msgspec.json.encode({"name": name, "url": url, "lease_s": lease_s})
        self._name = name
        self._headers = "".join(f"{header}: {value}\r\n" for header, value in headers.items() if key is None)
        self._lease_s = lease_s
        self._has_lease = False

    async def run(self) -> None:
        """Join and stay; leave when cancelled. A gateway that is not there is asked again and again."""
        problem = ""
        try:
            while True:
                before, (problem, pause_s) = problem, await self._renew()
                if problem != before:
                    logger.warning("%s", problem) if problem else logger.info("joined %s", self._url)
                await asyncio.sleep(pause_s)
        finally:
            if self._has_lease:  # where the name was refused, it is another's
                with suppress(ServeError, TimeoutError):
                    await self._ask("DELETE", f"/instances/{self._name}")
                    logger.info("left %s", self._url)
            await self._gateway.close()

    async def _renew(self) -> tuple[str, float]:
        """Return what is wrong ("" for nothing), and when to ask again."""
        try:
            await self._ask("POST", "/instances", self._body)
        except (InstanceLost, TimeoutError) as error:
            return f"{self._url} does not answer: {error or type(error).__name__}", _AGAIN_S
        except ServeError as error:
            self._has_lease = False
            return f"{self._url} answered {error.status}: {error.message[:300]}", self._lease_s / 3
        self._has_lease = True
        return "", self._lease_s / 3

    async def _ask(self, method: str, path: str, body: bytes = b"") -> None:
        headers = "content-type: application/json\r\n" + self._headers
        async with asyncio.timeout(self._lease_s / 3):
            await HttpCall(self._gateway, method, path, headers, [body] if body else []).ask()


_GRACE_S = 3
#: How long one thread may keep the interpreter while another wants it. A step of the engine lets go of it at each
#: operator; with Python's 5 ms, a busy event loop or preparation may slow it down by that much every time.
_SWITCH_INTERVAL_S = 0.0005


def run_instance(options: InstanceOptions) -> None:
    """Load the role's part of the model and serve the control API. Blocks.

    Raises ValueError for a model or a device that cannot be served.
    """
    options = remembered(options)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_is_no_broken_stream)
    raise_limit()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    prepare_process(options)
    uvloop.run(_serve(options))


def end_process() -> NoReturn:
    """End this process with exit code 0, after :func:`run_instance` has closed all that it had.

    The interpreter stays as it is: to take it apart with torch in it costs each instance a second of CPU time, and
    writes to all the memory that it shares with the process that it was forked from.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


async def _serve(options: InstanceOptions) -> None:
    instance = Instance(options)
    config = uvicorn.Config(
        NoBrowsers(
            control_server_app(instance.routes(), cluster_key(), lambda: urlsplit(instance.url).netloc),
            options.host,
        ),
        host=options.host,
        port=options.port,
        http=ControlHttp,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,  # longer than callers keep an idle connection: none is closed under a call
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    draining: list[asyncio.Task[None]] = []
    joined: list[asyncio.Task[None]] = []

    def stop() -> None:
        """Finish what is here first; at once when asked again."""
        if draining or not instance.ready:
            _stop(instance, server)
        else:
            draining.append(asyncio.create_task(_drain(instance, server, joined)))

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop)
    serving = asyncio.create_task(server.serve())
    starting = asyncio.create_task(_start(instance, joined))
    try:
        await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            server.should_exit = True
            await serving
            starting.result()
        await serving
    finally:
        for task in (starting, *draining, *joined):
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
        if instance.ready:
            await instance.close()


def _stop(instance: Instance, server: uvicorn.Server) -> None:
    """No more reports: the server waits for the end of every answer."""
    instance.reports.close()
    server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the instance is closed. Its
    connections are watched."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in self.servers if self.started else ():
            for listener in listening.sockets:
                watch_accepted(listener)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _drain(instance: Instance, server: _Server, joined: list[asyncio.Task[None]]) -> None:
    for task in joined:
        task.cancel()
    await asyncio.gather(*joined, return_exceptions=True)
    try:
        async with asyncio.timeout(instance.options.drain_s):
            await instance.drained()
    except TimeoutError:
        logger.warning("not all requests ended within %g s", instance.options.drain_s)
    _stop(instance, server)


async def _start(instance: Instance, joined: list[asyncio.Task[None]]) -> None:
    await instance.start()
    if (gateway := instance.options.join) is not None:
        joined.append(
            asyncio.create_task(
                Joining(gateway, instance.options.name, instance.url, admin_headers(), key=cluster_key()).run()
            )
        )
    logger.info("ready: role %s on %s, pid %d", instance.options.role, instance.options.device, os.getpid())


def _is_no_broken_stream(record: logging.LogRecord) -> bool:
    """Cutting a connection is how a broken stream is reported to the caller; it needs no traceback in the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], BrokenStream))
