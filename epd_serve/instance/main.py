"""``epd-serve instance``: serve one instance until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
from typing import NoReturn
from urllib.parse import urlsplit

import uvicorn
import uvloop

from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.config.keys import admin_headers
from epd_serve.imports import uncollected
from epd_serve.instance.calls import LookApp
from epd_serve.instance.instance import Instance
from epd_serve.protocol.addresses import NoBrowsers
from epd_serve.rpc.cluster import cluster_key
from epd_serve.rpc.joining import join_all
from epd_serve.rpc.server import LinkService, QuietServer
from epd_serve.rpc.sockets import listen, raise_limit, watch_accepted
from epd_serve.rpc.tls import tls_files

logger = logging.getLogger(__name__)

_GRACE_S = 3
#: Python's thread switch interval. An engine step releases the GIL at each operator; with Python's 5 ms, a busy
#: event loop or preparation thread could delay it that long each time.
_SWITCH_INTERVAL_S = 0.0005


def run_instance(options: InstanceOptions) -> None:
    """Load the role's part of the model and serve the control API. Blocks.

    Raises ValueError for an unsupported model or device.
    """
    options = options.in_remembered_role()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(message)s")
    raise_limit()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if not isinstance(options.model, ShapeConfig):
        with uncollected():
            from epd_serve.instance.loading.checkpoint import set_up

        set_up(options.threads)
    logger.info("modules imported")
    uvloop.run(_serve(options))


def end_process() -> NoReturn:
    """End this process with exit code 0: it has released its resources, or is loading and has nothing to finish.

    This skips interpreter shutdown, which with torch loaded costs a second of CPU time and copies the memory
    shared with the parent process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


async def _serve(options: InstanceOptions) -> None:
    tls = tls_files()
    if tls is not None:
        tls.check(options.advertise or options.host)
    instance = Instance(options)
    service = LinkService(
        calls=instance.handlers(), key=cluster_key(), own_address=lambda: urlsplit(instance.url).netloc
    )
    config = uvicorn.Config(
        NoBrowsers(LookApp(service), options.host),
        http=service.protocol,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so none closes under a call
        timeout_graceful_shutdown=_GRACE_S,
        **({} if tls is None else tls.server_options),
    )
    server = QuietServer(config)  # with uvicorn's signal handlers, it would end before the instance is closed
    listener = listen(options.host, options.port, "the instance (--port)")
    watch_accepted(listener)
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        """Drain, then stop; stop at once on the second signal, or before the instance is ready."""
        if not (instance.ready or working.done()):
            end_process()  # a thread loads the model, and the event loop would wait for it
        if draining or not instance.ready:
            instance.reports.close()  # the server waits for all streams to end
            server.should_exit = True
        else:
            draining.append(asyncio.create_task(drain()))

    async def drain() -> None:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        instance.reports.close()
        try:
            async with asyncio.timeout(options.drain_s):
                await instance.lifecycle.end()
        except TimeoutError:
            logger.warning("some requests did not finish within %g s", options.drain_s)
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop)
    serving, working = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(_work(instance))
    try:
        await asyncio.wait((serving, working), return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.cancelled() and working.exception() is not None:
            server.should_exit = True
        await serving
    finally:
        for task in (working, *draining):
            task.cancel()
        outcome, *_ = await asyncio.gather(working, *draining, return_exceptions=True)
        if instance.ready:
            await instance.close()
    if isinstance(outcome, Exception):
        raise outcome


async def _work(instance: Instance) -> None:
    """Start the instance, then keep it registered at its gateways, if any, until cancelled."""
    options = instance.options
    await instance.start()
    logger.info("ready: role %s on %s, pid %d", options.role, options.device, os.getpid())
    if options.join:
        await join_all(
            options.join, options.name, instance.url, admin_headers(), key=cluster_key(), tls=tls_files()
        )
