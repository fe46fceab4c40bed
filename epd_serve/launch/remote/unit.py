"""``epd-serve instance --unit``: the instances of one unit of the topology, as a pod and a Ray actor run them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from device.datasheets import emulated_kind, is_measured
from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.config.keys import admin_headers
from epd_serve.launch.choices import choose_engine
from epd_serve.launch.commands import mps_note, with_trust
from epd_serve.launch.deployment_record import DeploymentRecord
from epd_serve.launch.processes.ports import Ports, ports_each
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState
from epd_serve.launch.processes.supervisor import Supervisor, run_until
from epd_serve.launch.vllm.process import VllmProcess
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.rpc.app_server import serve_app
from epd_serve.rpc.joining import join_all
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units

logger = logging.getLogger(__name__)

#: Port of the deployment's first instance where its file names none.
BASE_PORT = 8100
#: Beyond the time for requests in progress, until a process is ended by force.
_GRACE_S = 5.0
#: Arguments of vLLM for one engine on several hosts.
_OVER_HOSTS = {"nnodes", "node_rank", "master_addr"}


def check_portable(config: DeploymentConfig) -> None:
    """Raise ValueError for what is tied to one machine."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if config.engine == "auto" and kinds & {"cuda", "npu"}:
        raise ValueError("engine: auto looks at the machine that it is on; write engine: native or engine: vllm")
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
            raise ValueError(f"{key} is for one machine, and has no meaning on others; take it out of the file")


def unit_placement(
    config: DeploymentConfig, unit: int, name: str | None, replica: int = 0
) -> tuple[InstancePlacement, ...]:
    """One replica of a unit of the topology, on devices that are counted from 0.

    ``name`` is that of its instance at the gateway; of several it is what theirs begin with; None: they are called
    as in the deployment. Raises ValueError where the topology has no such unit or replica.
    """
    units = place_units(config.topology, config.devices)
    if unit >= len(units) or replica >= len(units[unit]):
        there = ", ".join(f"{number} ({len(replicas)} replicas)" for number, replicas in enumerate(units))
        raise ValueError(f"there is no replica {replica} of a unit {unit}; topology {config.topology} has {there}")
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


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The processes of a unit.

    Attributes:
        config: the whole deployment, at this machine's address.
        roles: of vLLM's instances by name; a gateway asks native ones.
    """

    config: DeploymentConfig
    specs: list[ProcessSpec]
    roles: Mapping[str, str]


def prepare_unit(
    config: DeploymentConfig,
    here: Sequence[InstancePlacement],
    host: str,
    environment: Mapping[str, str],
    directory: Path,
) -> Unit:
    """Prepare instances that will listen on ``host``; ``directory`` takes their files.

    Raises ValueError for a wildcard, or where the deployment cannot be run in parts.
    """
    if is_wildcard(host):
        raise ValueError(
            f"{host} is no address that others could reach; write that of this machine, --host 10.0.0.7"
        )
    config = choose_engine(config)[0]
    config = config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})
    if config.starts_master:
        raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
    if (tls := config.read_tls()) is not None:
        tls.check(host)
    base, step = config.instances.base_port or BASE_PORT, ports_each(config)
    threads = max(1, num_cores() // max(1, sum(one.tensor_parallel for one in here)))
    record = DeploymentRecord(
        config=config,
        ports=Ports(gateway=0, instances=tuple(base + one.index * step for one in here)),
        environment=with_trust(config, {"OMP_NUM_THREADS": str(threads), **environment}),
        directory=directory,
    )
    specs, roles = record.begin(here), {}
    for number, spec in enumerate(specs):
        if (one := record.live.get(spec.name)) is None:
            continue
        if isinstance(one, VllmProcess):  # it has a number of its own in the cluster
            roles[spec.name] = str(one.options.role)
            one = replace(one, options=replace(one.options, number=crc32(spec.name.encode())))
            spec = one.spec(config, record.environment)
        grace_s = config.settings_for(str(one.options.role)).drain_s + _GRACE_S
        # Kubernetes and Ray collect the output
        specs[number] = replace(spec, can_fork=False, grace_s=grace_s, shares_output=True)
    return Unit(config=config, specs=specs, roles=roles)


async def run_unit(
    config: DeploymentConfig,
    here: Sequence[InstancePlacement],
    *,
    address: str,
    gateways: Sequence[str],
    health_port: int | None,
) -> int:
    """Run a unit until SIGTERM or SIGINT; returns the exit code, 1 where a process died before it was ready.

    Args:
        here: its instances, as of :func:`unit_placement`.
        address: that the instances listen on, and under which others reach them.
        gateways: URLs of the admin planes of gateways that the instances join while they are ready.
        health_port: of ``/health/live`` and ``/health/ready``; None: there is none.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s unit %(levelname)s %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-serve-unit-")))
        unit = prepare_unit(config, here, address, os.environ, directory)
        if note := mps_note(unit.config, os.environ, here):
            logger.info("%s", note)
        tls, key = unit.config.read_tls(), unit.config.read_cluster_key()
        joined: dict[str, asyncio.Task[None]] = {}

        def follow(process: ManagedProcess) -> None:
            """Have an instance join when it is ready, and leave when it no longer is."""
            name, url = process.spec.name, process.spec.url
            logger.info("%s %s", name, process.state)
            if process.state is ProcessState.READY and url:
                role, headers = unit.roles.get(name), admin_headers()
                joining = join_all(gateways, name, url, headers, role=role, key=key, tls=tls)
                joined[name] = asyncio.create_task(joining)
            elif name in joined:
                joined[name].cancel()

        def show_death(death: ProcessDied, delay_s: float) -> None:
            logger.warning("%s; it is started again in %g s", death.end, delay_s)

        supervisor = Supervisor(
            unit.specs,
            directory,
            restart=unit.config.restart == "on-failure",
            on_change=follow,
            on_death=show_death,
        )
        if health_port is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, health_port), family=family)
            await stack.enter_async_context(serve_app(_health_app(supervisor), listener, tls=tls))
        supervisor.start()
        try:
            if (death := await run_until(stop, supervisor.wait_failure())) is not None:
                logger.error("%s", death)
                return 1
        finally:
            for task in joined.values():  # they leave before their processes are told to end
                task.cancel()
            await asyncio.gather(*joined.values(), return_exceptions=True)
            await supervisor.stop()
    return 0


def _health_app(supervisor: Supervisor) -> Starlette:
    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if all(one.ready.is_set() for one in supervisor.processes) else 503)

    return Starlette(routes=[Route("/health/live", live), Route("/health/ready", ready)])
