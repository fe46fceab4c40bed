"""``epd-serve agent``: one place's part of a deployment, its instances at their gateways while they are ready."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from epd_serve.config import DeploymentConfig
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import admin_headers, join_headers
from epd_serve.config.load import placed_keys, with_placed_keys
from epd_serve.errors import InvalidRequest
from epd_serve.launch.commands import mps_note
from epd_serve.launch.processes.logs import log_files, log_piece, new_log_run
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState, spawn
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.launch.remote.part import PartRecord, Place, at_address
from epd_serve.launch.rollout import ApplyLimits, GatewayOrders, Rollout
from epd_serve.rpc.admin import AdminClient, AdminError
from epd_serve.rpc.app_server import serving
from epd_serve.rpc.cluster import ClusterLinks, check_cluster_key, cluster_key, is_proved
from epd_serve.rpc.joining import join_all
from epd_serve.rpc.tls import TlsFiles

logger = logging.getLogger(__name__)

_FORMAT = "%(asctime)s agent %(levelname)s %(message)s"
#: Between two looks at the gateway's deployment, and before a change that failed is tried again.
_LOOK_S, _AGAIN_S = 1.0, 10.0


async def run_agent(
    config: DeploymentConfig,
    place: Place,
    *,
    address: str,
    gateways: Sequence[str],
    port: int | None,
    host: str | None = None,
) -> int:
    """Run a part until SIGTERM or SIGINT; returns the exit code, 1 where a process died before it was ready.

    Args:
        address: that the instances listen on, and under which others reach them.
        gateways: URLs of admin planes that they join.
        port: of ``/health/live`` and ``/health/ready``, and of the logs; None: there is none.
        host: its name where the part is a host's: its logs are files then, and the part changes with the file of
            the gateway that is named first.
    """
    logging.basicConfig(level=logging.INFO, format=_FORMAT)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-serve-agent-")))
        log_dir = None if host is None else stack.enter_context(new_log_run()) or directory
        if log_dir is not None:
            own = logging.FileHandler(log_dir / f"{host}-agent.log")
            own.setFormatter(logging.Formatter(_FORMAT))
            logging.getLogger().addHandler(own)
        record = PartRecord.of(config, place, address, os.environ, directory)
        if note := mps_note(record.config, os.environ, place(record.config)):
            logger.info("%s", note)
        specs = record.begin()
        secret, tls = _cluster_key(record.config), record.config.read_tls()
        places = _Places(record, gateways, secret, tls)

        def died(death: ProcessDied, delay_s: float) -> None:
            logger.warning("%s died: %s; it is started again in %g s", death.name, death.how, delay_s)
            record.restarts(death.name)

        supervisor = Supervisor(
            specs,
            log_dir or directory,
            restart=record.config.restart == "on-failure",
            hang_timeout_s=record.config.hang_timeout_s,
            on_change=places.follow,
            on_death=died,
            start=partial(spawn, shares_output=log_dir is None),  # which whoever runs the agent collects
        )
        tasks = [asyncio.create_task(_run(supervisor)), asyncio.create_task(stop.wait())]
        if host is not None:
            orders = GatewayOrders(AdminClient(gateways[0], admin_headers(), secret, tls))
            tasks.append(asyncio.create_task(_follow(record, supervisor, orders)))
        if port is not None:
            await stack.enter_async_context(_served(address, port, supervisor, log_dir, secret, tls))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] not in done:
                logger.error("%s", next(iter(done)).result())
                return 1
        finally:
            await places.leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await supervisor.stop()
    return 0


async def _run(supervisor: Supervisor) -> ProcessDied:
    try:
        await supervisor.start()
    except ProcessDied as death:  # MPS, which the others need
        return death
    return await supervisor.wait_failure()


def _cluster_key(config: DeploymentConfig) -> str | None:
    named = read_secret(config.cluster_key, "cluster_key")
    return cluster_key() if named is None else check_cluster_key(named, "cluster_key")


async def _follow(record: PartRecord, supervisor: Supervisor, orders: GatewayOrders) -> None:
    """Have a host's instances follow the gateway's file until cancelled.

    A change that is impossible now is tried again: what stands in its way may be on another host.
    """

    async def before_start(_: ProcessSpec) -> None:
        return None

    rollout = Rollout(record, supervisor, orders, before_start, lambda text: logger.info("%s", text))
    address, problem = record.config.instances.host, ""
    own, seen = _without_address(placed_keys(record.config)), 0
    try:
        while True:
            await asyncio.sleep(_AGAIN_S if problem else _LOOK_S)
            try:
                now = await orders.client.ask("GET", "/deployment", timeout_s=_AGAIN_S)
                wanted, written = _without_address(now["keys"]), now["written"]
                if wanted == own and written == (seen or written):  # as it was started, or as it is
                    seen = written
                    continue
                if any(one.num_restarts == 0 and not one.ready.is_set() for one in supervisor.processes):
                    continue
                await rollout.apply(
                    at_address(with_placed_keys(record.config, now["keys"]), address), ApplyLimits()
                )
            except (AdminError, TimeoutError):
                continue
            except ValueError as error:
                if str(error) != problem:
                    logger.error("the gateway's file is not taken over: %s", error)
                problem = str(error)
            else:
                own, seen, problem = wanted, written, ""
                logger.info("this host is as the gateway's file has it")
    finally:
        rollout.call_off()
        await rollout.close()


def _without_address(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without the address that instances have on one host."""
    return {**keys, "instances": {**keys.get("instances", {}), "host": None}}


@asynccontextmanager
async def _served(
    host: str,
    port: int,
    supervisor: Supervisor,
    log_dir: Path | None,
    secret: str | None,
    tls: TlsFiles | None = None,
) -> AsyncIterator[None]:
    """``/health/live``, ``/health/ready``, and the logs for those that prove the cluster's key."""

    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        is_ready = supervisor.has_started and all(one.ready.is_set() for one in supervisor.processes)
        return Response(status_code=200 if is_ready else 503)

    async def logs(request: Request) -> Response:
        if not is_proved(request.scope):
            return _refused(403, "logs are for those that prove the deployment's cluster_key; set it in its file")
        files = {} if log_dir is None else log_files(log_dir)
        name = request.path_params.get("name")
        if name is None:
            return Response(msgspec.json.encode(list(files)), media_type="application/json")
        if name not in files:
            return _refused(404, f"there is no log of {name!r} here; there are: {', '.join(files) or 'none'}")
        after = int(request.query_params.get("after", "-1"))
        piece = await asyncio.to_thread(log_piece, files[name], None if after < 0 else after)
        return Response(msgspec.json.encode(piece), media_type="application/json")

    routes = [Route("/health/live", live), Route("/health/ready", ready)]
    routes += [Route("/logs", logs), Route("/logs/{name}", logs)]
    app: Any = Starlette(routes=routes)
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=False
    )
    if secret is not None:
        app = ClusterLinks(app, secret, "agent", lambda: f"{host}:{port}")
    async with serving(app, listener, tls=tls):
        yield


def _refused(status: int, message: str) -> Response:
    return Response(InvalidRequest(message).to_json(), status, media_type="application/json")


class _Places:
    """The places of the instances at their gateways: each has one while it is ready."""

    def __init__(
        self, record: PartRecord, gateways: Sequence[str], secret: str | None, tls: TlsFiles | None
    ) -> None:
        # A gateway asks native ones; vLLM says no role.
        is_vllm = record.config.engine == "vllm"
        self._roles = {name: str(one.options.role) for name, one in record.live.items()} if is_vllm else {}
        self._gateways = gateways
        self._headers = join_headers()
        self._key = secret
        self._tls = tls
        self._joined: dict[str, asyncio.Task[None]] = {}

    def follow(self, process: ManagedProcess) -> None:
        """A process has another state."""
        name = process.spec.name
        logger.info("%s %s", name, process.state)
        if process.state is ProcessState.READY and process.spec.url:
            joining = join_all(
                self._gateways,
                name,
                process.spec.url,
                self._headers,
                role=self._roles.get(name),
                key=self._key,
                tls=self._tls,
            )
            self._joined[name] = asyncio.create_task(joining)
        elif name in self._joined:
            self._joined[name].cancel()

    async def leave(self) -> None:
        """All of them, before their processes are told to end."""
        for task in self._joined.values():
            task.cancel()
        await asyncio.gather(*self._joined.values(), return_exceptions=True)
