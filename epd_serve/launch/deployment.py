"""A deployment on this machine: the processes of its instances and its gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from epd_serve.config import DeploymentConfig
from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.launch.apply import Applier, serve_applies
from epd_serve.launch.commands import autoscale_spec, master_spec, with_trust
from epd_serve.launch.deployment_record import DeploymentRecord, resolved
from epd_serve.launch.preflight import check_deployment
from epd_serve.launch.processes.forking import preload
from epd_serve.launch.processes.ports import choose_ports, listen
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessState
from epd_serve.launch.processes.runs import RunDirectory
from epd_serve.launch.processes.supervisor import Backoff, Supervisor
from epd_serve.types import Role


@dataclass(frozen=True, kw_only=True)
class InstanceHandle:
    """A running instance."""

    name: str
    role: Role
    url: str
    pid: int


class LocalDeployment:
    """Starts a deployment and stops it again::

        async with LocalDeployment(config, ready_timeout_s=60) as deployment:
            ...  # send requests to deployment.gateway_url

    Attributes:
        gateway_url: ``http://host:port`` for this machine; the API is below ``/v1``.
        log_dir: contains a log file for each process.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        file: Path | None = None,
        keep_logs: bool = False,
        ready_timeout_s: float | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
        on_death: Callable[[ProcessDied, float], None] = lambda death, delay_s: None,
    ) -> None:
        """Choose ports and prepare all command lines.

        Args:
            file: the deployment file, by which ``epd-serve down`` and ``epd-serve logs`` find the deployment.
            keep_logs: whether the logs stay after :meth:`stop` even if no process died.

        Raises ValueError if a port is taken or the model or a package is missing.
        """
        config = resolved(config)
        check_deployment(config, os.environ)
        preload(config)
        ports, environment = choose_ports(config), with_trust(config, os.environ)
        master = master_spec(config, ports, environment)
        self._keep_logs = keep_logs
        self._listener = listen(config.gateway.host, ports.gateway)
        try:
            self._run = RunDirectory.make(f"{config.gateway.host}:{ports.gateway}", file)
        except BaseException:
            self._listener.close()
            raise
        self.log_dir = self._run.path
        self._record = record = DeploymentRecord(
            config=config,
            ports=ports,
            environment=environment,
            directory=self._run.sockets,
            listener=self._listener.fileno(),
        )
        try:
            specs = record.begin(config.placement())
        except BaseException:
            self._close(keep_logs=False)
            raise
        gateway = record.next_gateway()
        self.gateway_url = gateway.url
        specs = [*([] if master is None else [master]), *specs, gateway]
        if config.elastic is not None:
            specs.append(autoscale_spec(record.write_gateway_file(), record.environment, record.admin))
        self._ready_timeout_s = ready_timeout_s
        self._supervisor = Supervisor(
            specs,
            self.log_dir,
            restart=config.restart == "on-failure",
            hang_timeout_s=hang_timeout_s,
            backoff=backoff,
            on_change=on_change,
            on_death=on_death,
        )
        self._applier = Applier(record, self._supervisor)
        self._control: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def config(self) -> DeploymentConfig:
        """The deployment as started or last applied."""
        return self._record.config

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """All processes: services, instances in placement order, the gateway, ``epd-serve autoscale``."""
        return self._supervisor.processes

    @property
    def instances(self) -> dict[str, InstanceHandle]:
        """The started instances by name, with their current roles."""
        live = self._record.live
        return {
            name: InstanceHandle(name=name, role=live[name].options.role, url=process.spec.url, pid=process.pid)
            for process in self.processes
            if (name := process.spec.name) in live
        }

    @property
    def admin_socket(self) -> Path:
        """The socket of the gateway's admin API."""
        return self._record.admin

    async def start(self) -> None:
        """Start all processes, without waiting until they are ready."""
        self._control = await serve_applies(self._run.run.control, self._applier)
        self._supervisor.start()

    async def wait_ready(self) -> None:
        """Return when all processes are ready. Raises ProcessDied, or TimeoutError after ``ready_timeout_s``."""
        await self._supervisor.wait_ready(self._ready_timeout_s)

    async def wait_failure(self) -> ProcessDied:
        """Return the first death of a process without a restart."""
        return await self._supervisor.wait_failure()

    async def apply(self, config: DeploymentConfig, say: Callable[[str], None] = lambda text: None) -> None:
        """Change the deployment while it serves (docs/guide/apply.md), as ``epd-serve apply`` does.

        ``say`` is called with each line and step. Raises ValueError for an impossible change, ApplyStopped if a
        step fails; the deployment then keeps serving with its present instances.
        """
        await self._applier.apply(config, say)

    async def stop(self) -> None:
        """End all processes, the gateway first and a mooncake_master last."""
        if self._control is not None:
            self._control.close()
        await self._applier.close()
        await self._supervisor.stop()
        died = any(process.state is ProcessState.DIED for process in self.processes)
        self._close(keep_logs=self._keep_logs or died or self._supervisor.num_deaths > 0)

    def kill(self) -> None:
        """Kill all processes. :meth:`stop` must still be awaited."""
        self._supervisor.kill()

    def _close(self, *, keep_logs: bool) -> None:
        self._listener.close()
        self._run.close(keep_logs=keep_logs)
