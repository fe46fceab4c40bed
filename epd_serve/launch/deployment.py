"""A whole deployment on this machine: instances and gateway, as processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from epd_serve.config import DeploymentConfig
from epd_serve.launch.commands import autoscale_spec, gateway_spec, master_spec, with_trust
from epd_serve.launch.control import ControlServer
from epd_serve.launch.deployment_record import DeploymentRecord, resolved
from epd_serve.launch.preflight import check_deployment
from epd_serve.launch.processes.forking import ForkServer, ForkServerGone
from epd_serve.launch.processes.ports import choose_ports, claim_ports, release
from epd_serve.launch.processes.process import (
    ManagedProcess,
    ProcessDied,
    ProcessSpec,
    ProcessState,
    RunningProcess,
    spawn,
)
from epd_serve.launch.processes.runtime import AddressTaken, Run, RuntimeDirectory
from epd_serve.launch.processes.supervisor import Backoff, Supervisor
from epd_serve.launch.rollout import DEFAULT_LIMITS, ApplyLimits, GatewayOrders, Rollout
from epd_serve.types import Role

#: What CPU instances run, transformers' part of it included that is imported when a model is loaded.
_PRELOADED = ("epd_serve.cli", "epd_serve.instance.main", "epd_serve.instance.loading.checkpoint")
#: What instances of a model without weights run.
_PRELOADED_OF_SHAPES = ("epd_serve.cli", "epd_serve.instance.main", "epd_serve.instance.loading.shape_model")


@dataclass(frozen=True, kw_only=True)
class InstanceHandle:
    """A running instance as its callers need it."""

    name: str
    role: Role
    url: str
    pid: int


class LocalDeployment:
    """Starts a deployment and stops it again::

        async with LocalDeployment(config, ready_timeout_s=60) as deployment:
            ...  # ask deployment.gateway_url

    Attributes:
        config: the deployment that was started, or applied last.
        gateway_url: ``http://host:port`` as reached from this machine; the API is below ``/v1``.
        log_dir: holds one log file for each process. A temporary one is removed by :meth:`stop` unless a
            process died, be it that it was started again.
        no_control: why it cannot be changed while it runs; "" where it can.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        file: Path | None = None,
        log_dir: Path | None = None,
        ready_timeout_s: float | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
        on_death: Callable[[ProcessDied, float], None] = lambda death, delay_s: None,
        on_apply: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Choose ports and prepare all command lines; nothing is started yet.

        ``file``: by which ``epd-serve down`` and ``epd-serve logs`` find the deployment.
        Raises ValueError where a port is taken, by a gateway that is being started again too, or the model or a
        package is not there.
        """
        config = resolved(config)
        check_deployment(config, os.environ)
        if log_dir is None:
            _check_temporary()
        ports = choose_ports(config)
        self._claims = claim_ports(config, ports)
        environment = with_trust(config, os.environ)
        master = master_spec(config, ports, environment)
        self.no_control = ""
        self._runtime: RuntimeDirectory | None = None
        self._log_dir_is_ours = log_dir is None
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="epd-serve-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._record = record = DeploymentRecord(
            config=config,
            ports=ports,
            environment=environment,
            directory=self.log_dir.resolve(),
        )
        try:
            specs = record.begin()
            self._runtime = self._make_runtime(config.gateway.host, ports.gateway, file)
        except BaseException:
            self._give_back(keep_logs=False)
            raise
        record.admin = None if self._runtime is None else self._runtime.admin
        self._preloaded = _PRELOADED if isinstance(config.model, str) else _PRELOADED_OF_SHAPES
        self._fork_server = self._fork_server_for([spec for spec in specs if spec.can_fork])
        gateway, *others = self._gateway_specs()
        self.gateway_url = gateway.url
        self._ready_timeout_s = ready_timeout_s

        def died(death: ProcessDied, delay_s: float) -> None:
            record.restarts(death.name)
            on_death(death, delay_s)

        self._supervisor = Supervisor(
            [*([] if master is None else [master]), *specs, gateway, *others],
            self.log_dir,
            restart=config.restart == "on-failure",
            hang_timeout_s=config.hang_timeout_s,
            backoff=backoff,
            on_change=on_change,
            on_death=died,
            start=self._start,
        )
        self._applier: Rollout | None = None
        if record.admin is not None:
            orders = GatewayOrders(record.admin, record)
            self._applier = Rollout(record, self._supervisor, orders, self._make_forkable, on_apply)
        self._control: ControlServer | None = None

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
        return self._record.config

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The mooncake_master and MPS if it has them, instances in placement order, the gateway and, where it is
        enabled, ``epd-serve autoscale``; none before the start."""
        return self._supervisor.processes

    @property
    def instances(self) -> dict[str, InstanceHandle]:
        """The started instances by name, with the roles that the launcher has given them."""
        live = self._record.live
        return {
            name: InstanceHandle(name=name, role=live[name].options.role, url=process.spec.url, pid=process.pid)
            for process in self.processes
            if (name := process.spec.name) in live
        }

    async def start(self) -> None:
        """Start all processes; returns before they are ready. Raises ProcessDied where MPS does not start."""
        if self._runtime is not None and self._applier is not None:
            try:
                control = ControlServer(self._applier)
                await control.start(self._runtime.control)
                self._control = control
            except OSError as error:
                self.no_control = f"{self._runtime.control}: {error.strerror or error}"
        if self._fork_server is not None:
            await self._fork_server.start()
        await self._supervisor.start()

    async def wait_ready(self) -> None:
        """Return when instances and gateway are ready. Raises ProcessDied, or TimeoutError after the limit."""
        await self._supervisor.wait_ready(self._ready_timeout_s)

    async def wait_failure(self) -> ProcessDied:
        """Return when a process has died for good, with which and why."""
        return await self._supervisor.wait_failure()

    async def apply(
        self,
        config: DeploymentConfig,
        limits: ApplyLimits = DEFAULT_LIMITS,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Change the deployment while it serves (docs/guide/apply.md), as ``epd-serve apply`` does.

        ``tell`` is called with each step. Raises ValueError for a change that cannot be made, ApplyStopped for one
        that stopped midway: the deployment serves on with the instances that it has then.
        """
        if self._applier is None:
            raise ValueError("this deployment was started without a way to change it")
        await self._applier.apply(config, limits, tell)

    async def stop(self) -> None:
        """End all processes within 10 s, the gateway first and a mooncake_master last."""
        if self._applier is not None:
            self._applier.call_off()  # it ends what it was starting, while the others end
        if self._control is not None:
            await self._control.close()
        await self._supervisor.stop()
        if self._applier is not None:
            await self._applier.close()
        if self._fork_server is not None:
            await self._fork_server.close()
        died = any(process.state is ProcessState.DIED for process in self.processes)
        self._give_back(keep_logs=died or self._supervisor.num_deaths > 0)

    def _gateway_specs(self) -> list[ProcessSpec]:
        """The gateway and, where it is enabled, ``epd-serve autoscale``."""
        record, config = self._record, self._record.config
        config_file = record.write_gateway_file(config)
        specs = [gateway_spec(config, record.ports, config_file, record.environment, record.admin)]
        if config.elastic.enabled or config.elastic.drift.enabled:
            if record.admin is None:
                raise ValueError(f"elastic needs the gateway's socket, which cannot be made: {self.no_control}")
            specs.append(autoscale_spec(config_file, record.environment, record.admin))
        return specs

    def _give_back(self, *, keep_logs: bool) -> None:
        """Close what instances share, and remove the logs unless somebody wants to read them."""
        release(self._claims)
        if self._runtime is not None:
            self._runtime.remove()
        if self._log_dir_is_ours and not keep_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def kill(self) -> None:
        """End all processes at once. :meth:`stop` must still be awaited."""
        self._supervisor.kill()

    def _fork_server_for(self, specs: Sequence[ProcessSpec]) -> ForkServer | None:
        return self._new_fork_server(specs[0]) if len(specs) > 1 else None

    def _new_fork_server(self, spec: ProcessSpec) -> ForkServer:
        return ForkServer(self._preloaded, spec.environment, self.log_dir / "fork-server.log")

    def _make_runtime(self, host: str, port: int, file: Path | None) -> RuntimeDirectory | None:
        run = Run(
            address=f"{host}:{port}",
            log_dir=str(self.log_dir.resolve()),
            file=None if file is None else str(file.resolve()),
        )
        run.write(self.log_dir)
        try:
            return RuntimeDirectory.make(run)
        except AddressTaken:
            raise
        except ValueError as error:
            self.no_control = str(error)
            return None

    async def _make_forkable(self, spec: ProcessSpec) -> None:
        """Start a fork server before a process is added: one that was alone at the start had no use for it."""
        if self._fork_server is None and spec.can_fork:
            server = self._new_fork_server(spec)
            try:
                await server.start()
            except BaseException as error:
                await server.close()
                if isinstance(error, OSError):  # the process is spawned
                    return
                raise
            self._fork_server = server  # processes that start meanwhile could not use it yet

    async def _start(self, spec: ProcessSpec, log_file: Path) -> RunningProcess:
        if self._fork_server is not None and spec.can_fork:
            with suppress(ForkServerGone):
                return await self._fork_server.fork(spec, log_file)
        return await spawn(spec, log_file)


def _check_temporary() -> None:
    """Raises ValueError where this user can write to no directory for temporary files."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise ValueError(
            f"logs and sockets of this run have no place ({error}); "
            "set EPD_SERVE_LOG_DIR or TMPDIR to a directory that can be written to"
        ) from None
