"""A deployment on this machine: the processes of its instances and its gateway."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from epd_serve.config import DeploymentConfig
from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.launch.apply import Applier
from epd_serve.launch.choices import resolve
from epd_serve.launch.preflight import check_deployment
from epd_serve.launch.processes.forking import preload
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.processes.process import ProcessState
from epd_serve.launch.processes.runs import Run
from epd_serve.launch.processes.supervisor import Backoff, Supervisor
from epd_serve.launch.record import DeploymentRecord, with_trust
from epd_serve.rpc.sockets import listen
from epd_serve.types import Role


@dataclass(frozen=True, kw_only=True)
class InstanceHandle:
    """A running instance."""

    name: str
    role: Role
    url: str
    pid: int


class LocalDeployment(Supervisor):
    """Starts a deployment and stops it again::

        async with LocalDeployment(config, ready_timeout_s=60) as deployment:
            ...  # send requests to deployment.gateway_url

    A script that does so needs ``if __name__ == "__main__":``, since instances import it, as with multiprocessing.
    Its processes are services, instances in placement order, the gateway and ``epd-serve autoscale``.

    Attributes:
        gateway_url: ``http://host:port`` for this machine; the API is below ``/v1``.
        admin_socket: the socket of the gateway's admin API.
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
    ) -> None:
        """Choose ports and prepare all command lines.

        Args:
            file: the deployment file, by which ``epd-serve down`` and ``epd-serve logs`` find the deployment.
            keep_logs: whether the logs stay after :meth:`stop` even if no process died.

        Raises ValueError if a port is taken or the model or a package is missing.
        """
        config, _ = resolve(config)
        check_deployment(config, os.environ)
        preload(config)
        ports = choose_ports(config)
        self._keep_logs = keep_logs
        self._ready_timeout_s = ready_timeout_s
        with ExitStack() as undo:
            listener = listen(config.gateway.host, ports.gateway, "gateway (gateway.port)")
            self._listener = undo.enter_context(listener)
            self._run, self._lock = Run.begin(f"{config.gateway.host}:{ports.gateway}", file)
            undo.callback(self._run.end, self._lock, keep_logs=False)
            self._record = record = DeploymentRecord(
                config=config,
                ports=ports,
                environment=with_trust(config, os.environ),
                directory=Path(self._run.sockets),
                listener=self._listener.fileno(),
            )
            specs = [*record.begin(config.placement()), record.next_gateway()]
            record.use_gateway(specs[-1])
            undo.pop_all()
        self.gateway_url, self.admin_socket = specs[-1].url, record.admin
        super().__init__(
            [*specs, *([] if config.elastic is None else [record.autoscale()])],
            Path(self._run.logs),
            restart=config.restart == "on-failure",
            hang_timeout_s=hang_timeout_s,
            backoff=backoff,
        )
        self._applier = Applier(record, self)

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
    def instances(self) -> dict[str, InstanceHandle]:
        """The started instances by name, with their current roles."""
        live = self._record.live
        return {
            name: InstanceHandle(name=name, role=live[name].role, url=process.spec.url, pid=process.pid)
            for process in self.processes
            if (name := process.spec.name) in live
        }

    async def start(self) -> None:
        """Start all processes, without waiting until they are ready."""
        await self._applier.serve(self._run.control)
        await super().start()

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when all processes are ready. Raises ProcessDied, or TimeoutError after ``ready_timeout_s``."""
        await super().wait_ready(timeout_s or self._ready_timeout_s)

    async def apply(self, config: DeploymentConfig, say: Callable[[str], None] = lambda text: None) -> None:
        """Change the deployment while it serves (docs/guide/apply.md), as ``epd-serve apply`` does.

        ``say`` is called with each line and step. Raises ValueError for an impossible change, ApplyStopped if a
        step fails; the deployment then keeps serving with its present instances.
        """
        await self._applier.apply(config, say)

    async def stop(self) -> None:
        """End all processes, the gateway first and services last."""
        await self._applier.close()
        await super().stop()
        died = any(process.state is ProcessState.DIED for process in self.processes)
        self._listener.close()
        self._run.end(self._lock, keep_logs=self._keep_logs or died or self.num_deaths > 0)
