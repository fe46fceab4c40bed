"""``epd-serve instance --unit``: the instances of one unit of the topology, as a pod and a Ray actor run them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zlib import crc32

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from device.datasheets import emulated_kind, is_measured
from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import admin_headers
from epd_serve.launch.commands import mps_note, with_trust
from epd_serve.launch.deployment_record import DeploymentRecord, Prepared
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.processes.ports import Ports, ports_each
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState, spawn
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.launch.vllm.process import VllmProcess
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.rpc.app_server import serving
from epd_serve.rpc.cluster import check_cluster_key, cluster_key
from epd_serve.rpc.joining import join_all
from epd_serve.rpc.tls import TlsFiles
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units

logger = logging.getLogger(__name__)

#: Port of the first instance where the deployment file names none.
BASE_PORT = 8100
#: Beyond the time for requests in progress, until a process is ended by force.
_GRACE_S = 5.0

#: Arguments of vLLM for one engine on several hosts.
_OVER_HOSTS = {"nnodes", "node_rank", "master_addr"}

#: Returns the instances of a unit, with the names that they have at the gateway and the devices that they have on
#: this machine. Raises ValueError where the deployment has no such unit.
Place = Callable[[DeploymentConfig], tuple[InstancePlacement, ...]]


def check_portable(config: DeploymentConfig) -> None:
    """Raise ValueError for what is tied to one machine."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if config.engine == "auto" and kinds & {"cuda", "npu"}:
        raise ValueError("engine: auto looks at the machine that it is on; write engine: native or engine: vllm")
    if config.tls is not None:
        raise ValueError("tls: no certificate names the addresses that instances get there; take it out")
    if config.elastic is not None:
        raise ValueError("elastic is a process of 'epd-serve up' on one machine; take it out of the file")
    files = {
        "trace": config.trace,
        "gateway.access_log": None if config.gateway.access_log in (None, "-") else config.gateway.access_log,
        "devices": next((one for one in config.devices if is_measured(emulated_kind(one))), None),
    }
    for key, path in files.items():
        if path is not None:
            raise ValueError(f"{key} names a file of this machine, which no other has; take it out of the file")
    for role in {str(one.role) for one in config.placement()}:
        for argument in sorted(_OVER_HOSTS & config.settings_for(role).engine_args.keys()):
            raise ValueError(f"engine_args of {role}: {argument}: an instance is on one host here; take it out")


def unit_placement(
    config: DeploymentConfig, unit: int, name: str | None, replica: int = 0
) -> tuple[InstancePlacement, ...]:
    """One replica of a unit of the topology, on devices that are counted from 0.

    ``name`` is that of its instance at the gateway; of several it is what theirs begin with; None: they are called
    as in the deployment. Raises ValueError where the topology has no such unit or replica.
    """
    units = place_units(config.topology, config.devices)
    if not 0 <= unit < len(units):
        raise ValueError(f"topology {config.topology} has units 0 to {len(units) - 1}; there is no unit {unit}")
    if not 0 <= replica < len(units[unit]):
        raise ValueError(
            f"unit {unit} of {config.topology} has replicas 0 to {len(units[unit]) - 1}, not {replica}"
        )
    here = units[unit][replica]
    own = list(dict.fromkeys(device for one in here for device in one.devices))
    local = {device: f"{device.rpartition(':')[0]}:{number}" for number, device in enumerate(own)} | {CPU: CPU}
    here = tuple(replace(one, devices=tuple(local[device] for device in one.devices)) for one in here)
    if name is None:
        return here
    names = {one.name: name if len(here) == 1 else f"{name}-{one.name}" for one in here}
    return tuple(
        replace(
            one, name=names[one.name], shares_device_with=tuple(names[other] for other in one.shares_device_with)
        )
        for one in here
    )


@dataclass(slots=True, kw_only=True)
class UnitRecord(DeploymentRecord):
    """The instances of one unit. ``config`` is the whole deployment, at this machine's address."""

    place: Place

    @classmethod
    def of(
        cls, config: DeploymentConfig, place: Place, host: str, environment: Mapping[str, str], directory: Path
    ) -> UnitRecord:
        """Prepare the record of instances that will listen on ``host``; ``directory`` takes their files.

        Raises ValueError for a wildcard, where there is no such unit, or where the deployment cannot be run in
        parts.
        """
        if is_wildcard(host):
            raise ValueError(
                f"{host} is no address that others could reach; write that of this machine, --host 10.0.0.7"
            )
        config = choose_engine(config).config
        config = config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})
        if config.starts_master:
            raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
        if (tls := config.read_tls()) is not None:
            tls.check(host)
        here = place(config)
        base, step = config.instances.base_port or BASE_PORT, ports_each(config)
        threads = max(1, num_cores() // max(1, sum(one.tensor_parallel for one in here)))
        return cls(
            config=config,
            ports=Ports(gateway=0, instances=tuple(base + index * step for index in range(len(here)))),
            environment=with_trust(config, {"OMP_NUM_THREADS": str(threads), **environment}),
            directory=directory,
            place=place,
        )

    def placement(self) -> Sequence[InstancePlacement]:
        return self.place(self.config)

    def add(self, instance: Prepared) -> None:
        """Add an instance; vLLM's has a number of its own in the cluster."""
        if isinstance(instance, VllmProcess):
            numbered = replace(instance.options, number=crc32(instance.options.name.encode()))
            instance = replace(instance, options=numbered)
        DeploymentRecord.add(self, instance)

    def spec(self, name: str) -> ProcessSpec:
        """Return the process of an instance, which may take the time to finish what it has."""
        grace_s = self.config.settings_for(str(self.live[name].options.role)).drain_s + _GRACE_S
        return replace(DeploymentRecord.spec(self, name), can_fork=False, grace_s=grace_s)


async def run_unit(
    config: DeploymentConfig, place: Place, *, address: str, gateways: Sequence[str], health_port: int | None
) -> int:
    """Run a unit until SIGTERM or SIGINT; returns the exit code, 1 where a process died before it was ready.

    Args:
        address: that the instances listen on, and under which others reach them.
        gateways: URLs of the admin planes of gateways that the instances join.
        health_port: of ``/health/live`` and ``/health/ready``; None: there is none.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s unit %(levelname)s %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-serve-unit-")))
        record = UnitRecord.of(config, place, address, os.environ, directory)
        if note := mps_note(record.config, os.environ, place(record.config)):
            logger.info("%s", note)
        specs = record.begin()
        tls = record.config.read_tls()
        memberships = _Memberships(record, gateways, _cluster_key(record.config), tls)

        def died(death: ProcessDied, delay_s: float) -> None:
            logger.warning("%s; it is started again in %g s", death.end, delay_s)

        supervisor = Supervisor(
            specs,
            directory,
            restart=record.config.restart == "on-failure",
            on_change=memberships.follow,
            on_death=died,
            start=partial(spawn, shares_output=True),  # Kubernetes and Ray collect it
        )
        tasks = [asyncio.create_task(_run(supervisor)), asyncio.create_task(stop.wait())]
        if health_port is not None:
            await stack.enter_async_context(_serving_health(address, health_port, supervisor, tls))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] not in done:
                logger.error("%s", next(iter(done)).result())
                return 1
        finally:
            await memberships.leave()
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


@asynccontextmanager
async def _serving_health(
    host: str, port: int, supervisor: Supervisor, tls: TlsFiles | None
) -> AsyncIterator[None]:
    async def live(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        is_ready = supervisor.has_started and all(one.ready.is_set() for one in supervisor.processes)
        return Response(status_code=200 if is_ready else 503)

    app = Starlette(routes=[Route("/health/live", live), Route("/health/ready", ready)])
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=False
    )
    async with serving(app, listener, tls=tls):
        yield


class _Memberships:
    """Has each instance joined at its gateways while it is ready."""

    def __init__(
        self, record: UnitRecord, gateways: Sequence[str], secret: str | None, tls: TlsFiles | None
    ) -> None:
        # A gateway asks native ones; vLLM says no role.
        is_vllm = record.config.engine == "vllm"
        self._roles = {name: str(one.options.role) for name, one in record.live.items()} if is_vllm else {}
        self._gateways = gateways
        self._headers = admin_headers()
        self._key = secret
        self._tls = tls
        self._joined: dict[str, asyncio.Task[None]] = {}

    def follow(self, process: ManagedProcess) -> None:
        """Join when a process is ready, leave when it no longer is."""
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
        """Leave the gateways with all instances, before their processes are told to end."""
        for task in self._joined.values():
            task.cancel()
        await asyncio.gather(*self._joined.values(), return_exceptions=True)
