"""The launcher's record of its instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.options import write_role_settings
from epd_serve.launch.choices import choose_all
from epd_serve.launch.commands import (
    PreparedInstance,
    gateway_spec,
    master_address,
    mps_spec,
    prepare_instances,
    with_mps,
)
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import VllmFound
from epd_serve.launch.vllm.process import VllmProcess, prepare_vllm
from epd_serve.topology import InstancePlacement
from epd_serve.topology.remembered import remember_role, remembered_role, role_file

Prepared = PreparedInstance | VllmProcess


@dataclass(slots=True, kw_only=True)
class DeploymentRecord:
    """The current state of a deployment; each instance with its current options.

    Attributes:
        config: the deployment as started or last applied.
        directory: the launcher's, with files that the processes share.
        live: all instances by name.
        engines: the vLLM of each interpreter, once asked.
        listener: descriptor of the listening socket of the successive gateways.
    """

    config: DeploymentConfig
    ports: Ports
    environment: Mapping[str, str]
    directory: Path
    live: dict[str, Prepared] = field(default_factory=dict)
    engines: dict[str, VllmFound] = field(default_factory=dict)
    listener: int | None = None
    _num_gateways: int = 0

    @property
    def admin(self) -> Path:
        """The socket of the gateway's admin API; a link to the current gateway's."""
        return self.directory / "admin"

    def begin(self, placement: Sequence[InstancePlacement]) -> list[ProcessSpec]:
        """Return the processes of the instances, after that of an MPS daemon if they need one.

        Raises ValueError if the model or a package is missing.
        """
        write_role_settings(self.directory, self.config.settings_by_role())
        self.environment = with_mps(self.config, self.environment, self.directory, placement)
        for instance in self.prepare(self.config, placement, self.ports.instances):
            self.add(instance)
        daemon = mps_spec(self.environment, self.directory)
        return [*([] if daemon is None else [daemon]), *(self.spec(name) for name in self.live)]

    def prepare(
        self, config: DeploymentConfig, placement: Sequence[InstancePlacement], ports: Sequence[int]
    ) -> Sequence[Prepared]:
        """Prepare the instances of a deployment. Raises ValueError if they cannot be started here."""
        if config.engine == "vllm":
            return prepare_vllm(config, placement, ports, self.environment, self.directory, self.engines)
        master = master_address(config, self.ports)
        return prepare_instances(config, placement, ports, self.environment, self.directory, master)

    def spec(self, name: str) -> ProcessSpec:
        """Return the process of an instance in its current role."""
        return self.live[name].spec(self.config, self.environment)

    def add(self, instance: Prepared) -> None:
        """Add an instance before its start; its name may have been used before."""
        name = instance.options.name
        role_file(self.directory, name).unlink(missing_ok=True)
        if isinstance(instance, VllmProcess):  # vLLM does not know its role
            remember_role(self.directory, name, instance.options.role)
        self.live[name] = instance

    def remove(self, name: str) -> None:
        role_file(self.directory, name).unlink(missing_ok=True)
        self.live.pop(name, None)

    def read_roles(self) -> None:
        """Update the roles of instances that were switched."""
        for name, instance in self.live.items():
            role = remembered_role(self.directory, name)
            if role is not None and role != instance.options.role:
                self.live[name] = instance.switched(role, self.config.settings_for(str(role)))

    def next_gateway(self) -> ProcessSpec:
        """Return the process of another gateway, and redirect the link to its admin socket."""
        assert self.listener is not None
        self._num_gateways += 1
        own, link = self.directory / f"admin.{self._num_gateways}", self.directory / "admin.new"
        link.symlink_to(own.name)
        link.replace(self.admin)
        return gateway_spec(
            self.config, self.ports.gateway, self.listener, self.write_gateway_file(), self.environment, own
        )

    def write_gateway_file(self) -> Path:
        """Replace the gateway's file: the configuration with the current instances, without the cluster key."""
        without: dict[str, Any] = {"gateway": {"instances": None}}
        if self.config.cluster_key is not None:
            without["cluster_key"] = None
        urls = {name: self.spec(name).url for name in self.live}
        config = change_config(change_config(self.config, without), {"gateway": {"instances": urls}})
        file = self.directory / "deployment.yaml"
        new = file.with_suffix(".part")
        new.touch(mode=0o600)  # it may contain secrets
        new.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")  # JSON is YAML
        new.replace(file)
        return file


def resolved(config: DeploymentConfig) -> DeploymentConfig:
    """Return the config with its engine chosen and absolute paths, as the gateway reads it elsewhere."""
    config, _ = choose_all(config)
    changes: dict[str, Any] = {}
    for key in ("trace", "chat_template"):
        if (path := getattr(config, key)) is not None:
            changes[key] = str(path.absolute())
    if config.gateway.access_log not in (None, "-"):
        changes["gateway"] = {"access_log": str(Path(config.gateway.access_log or "").absolute())}
    return change_config(config, changes) if changes else config
