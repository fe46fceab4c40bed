"""The launcher's record of a deployment: its instances, and the commands of all its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device import mps
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.options import write_role_settings
from epd_serve.launch import native
from epd_serve.launch.native import PreparedInstance, prepare_native, program_environment
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.process import prepare_vllm
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology import InstancePlacement
from epd_serve.topology.remembered import remember_role, remembered_role, role_file
from epd_serve.transfer.mooncake.engine import check_installed, master_command

#: The MPS daemon's time to end.
_MPS_GRACE_S = 3.0


@dataclass(slots=True, kw_only=True)
class DeploymentRecord:
    """The current state of a deployment; each instance with its current options.

    Attributes:
        config: the deployment as started or last applied.
        environment: result of :func:`with_trust`.
        directory: the launcher's, with files that the processes share.
        live: all instances by name.
        listener: descriptor of the socket at which the successive gateways listen.
    """

    config: DeploymentConfig
    ports: Ports
    environment: Mapping[str, str]
    directory: Path
    live: dict[str, PreparedInstance] = field(default_factory=dict)
    listener: int | None = None
    _num_gateways: int = 0

    @property
    def admin(self) -> Path:
        """The socket of the gateway's admin API; a link to the current gateway's."""
        return self.directory / "admin"

    def begin(self, placement: Sequence[InstancePlacement]) -> list[ProcessSpec]:
        """Return the processes of the instances, after those of the services that they use.

        These are a mooncake_master, and an MPS daemon if shares of GPUs need one and none runs. Raises ValueError
        if the model, a package or a program is missing.
        """
        config, services = self.config, list[ProcessSpec]()
        write_role_settings(self.directory, config.settings_by_role())
        if config.uses_mooncake:
            check_installed()
        if self.ports.master is not None:
            port, http_port = self.ports.master
            services.append(
                ProcessSpec(
                    name="master",
                    label="Mooncake Store",
                    command=tuple(master_command(config.instances.host, port, http_port)),
                    environment=self.environment,
                    url=url_of(config.instances.host, http_port),
                    stops="last",
                )
            )
        if lacks_mps(config, self.environment, placement):
            variables = mps.own_daemon(self.directory / "mps", self.environment)
            self.environment = {**self.environment, **variables}
            services.append(
                ProcessSpec(
                    name="mps",
                    label="NVIDIA MPS: shares of GPUs",
                    command=(sys.executable, "-P", "-m", "device.mps", str(os.getpid())),
                    environment={**self.environment, "PYTHONUNBUFFERED": "1"},
                    ready_file=mps.pid_file(self.environment),
                    stops="last",
                    grace_s=_MPS_GRACE_S,
                )
            )
        for instance in self.prepare(config, placement, self.ports.instances):
            self.add(instance)
        return [*services, *(instance.spec for instance in self.live.values())]

    def prepare(
        self, config: DeploymentConfig, placement: Sequence[InstancePlacement], ports: Sequence[int]
    ) -> list[PreparedInstance]:
        """Prepare the instances of a deployment. Raises ValueError if they cannot be started here."""
        if config.engine == "vllm":
            return prepare_vllm(config, placement, ports, self.environment, self.directory)
        master = f"{config.instances.host}:{self.ports.master[0]}" if self.ports.master else None
        return prepare_native(config, placement, ports, self.environment, self.directory, master)

    def add(self, instance: PreparedInstance) -> None:
        """Add an instance before its start; its name may have been used before."""
        role_file(self.directory, instance.name).unlink(missing_ok=True)
        if self.config.engine == "vllm":  # which does not know its role
            remember_role(self.directory, instance.name, instance.role)
        self.live[instance.name] = instance

    def remove(self, name: str) -> None:
        role_file(self.directory, name).unlink(missing_ok=True)
        self.live.pop(name, None)

    def read_roles(self) -> None:
        """Update the roles of instances that were switched."""
        for name, instance in self.live.items():
            role = remembered_role(self.directory, name)
            if role is not None and role != instance.role:
                self.live[name] = instance.switched(role, self.config)

    def use_gateway(self, gateway: ProcessSpec) -> None:
        """Redirect the link to a gateway's admin socket."""
        assert gateway.socket is not None
        link = self.directory / "admin.new"
        link.symlink_to(gateway.socket.name)
        link.replace(self.admin)

    def next_gateway(self) -> ProcessSpec:
        """Return the process of another gateway."""
        assert self.listener is not None
        self._num_gateways += 1
        own = self.directory / f"admin.{self._num_gateways}"
        host, port = self.config.gateway.host, self.ports.gateway
        command = ("proxy", "--config", str(self.write_gateway_file()), "--admin-path", str(own), "--host", host)
        encodes = any(one.role.encodes for one in self.config.placement())
        return ProcessSpec(
            name="gateway",
            label="OpenAI API",
            command=(*native.PROGRAM, *command, "--port", str(port), "--listener", str(self.listener)),
            environment=program_environment(self.environment),
            url=url_of(host, port),
            socket=own,
            pass_fds=(self.listener,),
            # wait for an encoder, or P would load the tower for the first image
            first_health="/health?role=EPD" if encodes else "/health",
            stops="first",
            grace_s=self.config.instances.drain_s + 1.5,
        )

    def autoscale(self) -> ProcessSpec:
        """Return the process of ``epd-serve autoscale``."""
        return ProcessSpec(
            name="autoscale",
            label="roles and plans by load",
            command=(*native.PROGRAM, "autoscale", str(self.write_gateway_file()), "--socket", str(self.admin)),
            environment=program_environment(self.environment),
            stops="first",
        )

    def write_gateway_file(self) -> Path:
        """Replace the gateway's file: the configuration with the current instances, without the cluster key."""
        without: dict[str, Any] = {"gateway": {"instances": None}}
        if self.config.cluster_key is not None:
            without["cluster_key"] = None
        urls = {name: instance.spec.url for name, instance in self.live.items()}
        config = change_config(change_config(self.config, without), {"gateway": {"instances": urls}})
        file = self.directory / "deployment.yaml"
        new = file.with_suffix(".part")
        new.touch(mode=0o600)  # it may contain secrets
        new.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")  # JSON is YAML
        new.replace(file)
        return file


def with_trust(config: DeploymentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the cluster key and the paths of the certificates.

    Processes started later get the same key even if its file has changed.
    """
    key, tls = config.read_cluster_key(), config.read_tls()
    return {**environment, **({CLUSTER_KEY: key} if key else {}), **(tls.environment if tls else {})}


def lacks_mps(
    config: DeploymentConfig, environment: Mapping[str, str], placement: Sequence[InstancePlacement]
) -> bool:
    """Return whether instances have shares of a GPU, which need MPS, and MPS is not running."""
    on_gpus = {one.name for one in placement if one.devices[0].startswith("cuda:")}
    has_shares = bool(on_gpus) and not on_gpus.isdisjoint(config.device_shares(placement))
    return has_shares and not mps.is_running(environment)


def mps_note(
    config: DeploymentConfig, environment: Mapping[str, str], placement: Sequence[InstancePlacement]
) -> str:
    """Return a sentence on MPS for processes that share GPUs; "" without any."""
    shared = [one for one in placement if one.shares_device_with and one.devices[0].startswith("cuda:")]
    if not shared:
        return ""
    if mps.is_running(environment):
        return f"MPS: on, by the daemon in {mps.pid_file(environment).parent}"
    if lacks_mps(config, environment, placement):
        return f"MPS: 'epd-serve up' starts it for the shares of GPUs; by hand: {mps.PIPES}=DIR {mps.CONTROL} -d"
    where = ", ".join(dict.fromkeys(device for one in shared for device in one.devices))
    return f"MPS: off, so the instances on {where} take turns; set shares, as in instances: {{share: 0.5}}"
