"""``epd-serve instance --unit``: the instances of one unit of the topology, in a pod or a Ray actor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from device.datasheets import emulated_kind, is_measured
from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.config.keys import admin_headers
from epd_serve.launch.choices import choose_engine
from epd_serve.launch.processes.ports import Ports, ports_each
from epd_serve.launch.processes.process import ProcessDied, ProcessState
from epd_serve.launch.processes.supervisor import Process, Supervisor, run_until
from epd_serve.launch.record import DeploymentRecord, mps_note, with_trust
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.rpc.joining import join_all
from epd_serve.rpc.server import serve_app
from epd_serve.rpc.sockets import listen
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units

logger = logging.getLogger(__name__)

#: Default port of the first instance.
BASE_PORT = 8100
#: Time for a process to end after its last request, before it is killed.
_GRACE_S = 5.0
#: Arguments of vLLM for one engine on several hosts.
_OVER_HOSTS = {"nnodes", "node_rank", "master_addr"}


def check_portable(config: DeploymentConfig) -> None:
    """Raise ValueError for options limited to one machine."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if config.engine == "auto" and kinds & {"cuda", "npu"}:
        raise ValueError("engine: auto inspects the local machine; write engine: native or engine: vllm")
    tied = {
        "tls": config.tls,
        "elastic": config.elastic,
        "trace": config.trace,
        "gateway.access_log": None if config.gateway.access_log == "-" else config.gateway.access_log,
        "devices": next((one for one in config.devices if is_measured(emulated_kind(one))), None),
    }
    for role in (str(one.role) for one in config.placement()):
        arguments = sorted(_OVER_HOSTS & config.settings_for(role).engine_args.keys())
        tied |= {f"engine_args of {role}: {argument}": argument for argument in arguments}
    for key, value in tied.items():
        if value is not None:
            raise ValueError(f"{key} is for one machine only; remove it from the file")


def unit_placement(
    config: DeploymentConfig, unit: int, name: str | None, replica: int = 0
) -> tuple[InstancePlacement, ...]:
    """Return the instances of one replica of a unit, on devices counted from 0.

    ``name``: of a single instance at the gateway, or the prefix of several; None: the names in the deployment.
    Raises ValueError for an unknown unit or replica.
    """
    units = place_units(config.topology, config.devices)
    if unit >= len(units) or replica >= len(units[unit]):
        known = ", ".join(f"{number} ({len(replicas)} replicas)" for number, replicas in enumerate(units))
        raise ValueError(f"topology {config.topology} lacks replica {replica} of unit {unit}; its units: {known}")
    here = units[unit][replica]
    own = list(dict.fromkeys(device for one in here for device in one.devices))
    local = {device: f"{device.rpartition(':')[0]}:{number}" for number, device in enumerate(own)} | {CPU: CPU}
    names = {
        one.name: one.name if name is None else name if len(here) == 1 else f"{name}-{one.name}" for one in here
    }
    return tuple(
        replace(
            one,
            name=names[one.name],
            devices=tuple(local[device] for device in one.devices),
            shares_device_with=tuple(names[other] for other in one.shares_device_with),
        )
        for one in here
    )


class Unit(Supervisor):
    """The processes of a unit, whose instances join the gateways while they are ready.

    Args:
        config: the whole deployment.
        here: the instances, from :func:`unit_placement`.
        host: this machine's address, to listen on and for others.
        directory: for files.
        gateways: URLs of the admin planes of gateways.

    Raises ValueError for a wildcard, or for a deployment limited to one machine.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        here: Sequence[InstancePlacement],
        host: str,
        environment: Mapping[str, str],
        directory: Path,
        gateways: Sequence[str] = (),
    ) -> None:
        if is_wildcard(host):
            raise ValueError(f"others cannot reach {host}; write this machine's address, as in --host 10.0.0.7")
        config = choose_engine(config)[0]
        config = config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})
        if config.starts_master:
            raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
        self.tls = config.read_tls()
        if self.tls is not None:
            self.tls.check(host)
        base, step = config.instances.base_port or BASE_PORT, ports_each(config)
        threads = max(1, num_cores() // max(1, sum(one.tensor_parallel for one in here)))
        record = DeploymentRecord(
            config=config,
            ports=Ports(gateway=0, instances=tuple(base + one.index * step for one in here)),
            environment=with_trust(config, {"OMP_NUM_THREADS": str(threads), **environment}),
            directory=directory,
        )
        specs = record.begin(here)
        for number, spec in enumerate(specs):
            if (one := record.live.get(spec.name)) is not None:
                grace_s = config.settings_for(str(one.role)).drain_s + _GRACE_S
                # Kubernetes and Ray collect the output
                specs[number] = replace(spec, can_fork=False, grace_s=grace_s, shares_output=True)
        #: Gateways ask native instances for their roles.
        self._roles = {name: str(one.role) for name, one in record.live.items() if config.engine == "vllm"}
        super().__init__(specs, directory, restart=config.restart == "on-failure")
        self._gateways, self._key = gateways, config.read_cluster_key()
        self._joined: dict[str, asyncio.Task[None]] = {}

    def on_change(self, process: Process) -> None:
        name, url = process.spec.name, process.spec.url
        logger.info("%s %s", name, process.state)
        if process.state is ProcessState.READY and url:
            role, headers = self._roles.get(name), admin_headers()
            joining = join_all(self._gateways, name, url, headers, role=role, key=self._key, tls=self.tls)
            self._joined[name] = asyncio.create_task(joining)
        elif name in self._joined:
            self._joined[name].cancel()

    def on_death(self, death: ProcessDied, delay_s: float) -> None:
        logger.warning("%s; restarting it in %g s", death.end, delay_s)

    async def stop(self) -> None:
        for task in self._joined.values():  # leave before the processes end
            task.cancel()
        await asyncio.gather(*self._joined.values(), return_exceptions=True)
        await super().stop()

    async def answer_health(self, request: Request) -> Response:
        is_well = request.url.path == "/health/live" or all(process.ready.is_set() for process in self.processes)
        return Response(status_code=200 if is_well else 503)


async def run_unit(
    config: DeploymentConfig,
    here: Sequence[InstancePlacement],
    *,
    address: str,
    gateways: Sequence[str],
    health_port: int | None,
) -> int:
    """Run a unit until SIGTERM or SIGINT; return the exit code, 1 if a process died for good.

    ``health_port``: port of ``/health/live`` and ``/health/ready``; None: no health server.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s unit %(levelname)s %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-serve-unit-")))
        unit = Unit(config, here, address, os.environ, directory, gateways)
        if note := mps_note(config, os.environ, here):
            logger.info("%s", note)
        if health_port is not None:
            listener = listen(address, health_port, "the health server (--health-port)")
            routes = [Route(f"/health/{path}", unit.answer_health) for path in ("live", "ready")]
            await stack.enter_async_context(serve_app(Starlette(routes=routes), listener, tls=unit.tls))
        await unit.start()
        try:
            if (death := await run_until(stop, unit.wait_failure())) is not None:
                logger.error("%s", death)
                return 1
        finally:
            await unit.stop()
    return 0
