"""The launcher's record of the deployment that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.role_files import replace_role_settings, write_role_settings
from epd_serve.config.sections import InstanceSettings
from epd_serve.launch.commands import (
    PreparedInstance,
    check_mps,
    mps_spec,
    prepare_instances,
    with_mps,
)
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.layout_choice import choose_layout
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import VllmFound
from epd_serve.launch.vllm.process import VllmProcess, prepare_vllm
from epd_serve.topology import InstancePlacement
from epd_serve.topology.remembered import remember_role, remembered_role, role_file
from epd_serve.types import Role

Prepared = PreparedInstance | VllmProcess
#: Of the launcher's directory.
GATEWAY_FILE = "deployment.yaml"


@dataclass(slots=True, kw_only=True)
class DeploymentRecord:
    """The deployment at this moment; each instance with its present options.

    Attributes:
        config: the deployment that was started, or applied last.
        role_config: the deployment whose settings instances take when they change their role.
        directory: of the launcher, with the files that the processes share.
        live: all instances, with the settings that their processes have.
        engines: what is known of the vLLM of each interpreter.
        admin: the socket of the gateway's admin API; None: it has none.
    """

    config: DeploymentConfig
    ports: Ports
    environment: Mapping[str, str]
    directory: Path
    role_config: DeploymentConfig = field(init=False)
    live: dict[str, Prepared] = field(default_factory=dict)
    engines: dict[str, VllmFound] = field(default_factory=dict)
    admin: Path | None = None
    _of_roles: dict[str, InstanceSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.role_config = self.config

    def begin(self) -> list[ProcessSpec]:
        """The processes of all instances that are to be started in the directory, in which nothing runs yet.

        An MPS daemon, where they need one, comes first. Raises ValueError where the model or a package is not
        there.
        """
        placement = self.placement(self.config)
        write_role_settings(self.directory, self.config)
        self.environment = with_mps(self.config, self.environment, self.directory, placement)
        for instance in self._prepared(self.config, placement, self.ports):
            self.joined(instance)
        daemon = mps_spec(self.environment, self.directory)
        return [*([] if daemon is None else [daemon]), *(self.spec(name) for name in self.live)]

    def prepare(self, config: DeploymentConfig) -> Sequence[Prepared]:
        """The instances of another deployment, were they started here, with ports that they would not get.

        Raises ValueError where they cannot be.
        """
        placement = self.placement(config)
        check_mps(config, self.environment, placement)
        return self._prepared(config, placement, replace(self.ports, instances=(1,) * len(placement)))

    def _prepared(
        self, config: DeploymentConfig, placement: Sequence[InstancePlacement], ports: Ports
    ) -> Sequence[Prepared]:
        if config.engine == "vllm":
            return prepare_vllm(config, placement, ports.instances, self.environment, self.directory, self.engines)
        return prepare_instances(config, placement, ports, self.environment, self.directory)

    def placement(self, config: DeploymentConfig) -> Sequence[InstancePlacement]:
        """The instances of a deployment that belong here."""
        return config.placement()

    def spec(self, name: str) -> ProcessSpec:
        """The process of an instance if it is started again, with the role that it has now."""
        return self.spec_of(self._started_again(name))

    def spec_of(self, instance: Prepared) -> ProcessSpec:
        return instance.spec(self.config, self.environment)

    def starts(self, instance: Prepared) -> None:
        """An instance is about to be started, perhaps with a name that another had before."""
        role_file(self.directory, instance.options.name).unlink(missing_ok=True)
        if isinstance(instance, VllmProcess):  # which does not know its role
            remember_role(self.directory, instance.options.name, instance.options.role)

    def joined(self, instance: Prepared) -> None:
        """Add an instance to the deployment."""
        self._of_roles.pop(instance.options.name, None)
        self.live[instance.options.name] = instance

    def left(self, name: str) -> None:
        del self.live[name]

    def replace_role_settings(self, config: DeploymentConfig) -> None:
        """Replace the settings that instances take when they change their role from now on."""
        replace_role_settings(self.directory, config)
        self.role_config = config

    def restarts(self, name: str) -> None:
        """Note that an instance's process has died and is started again."""
        if name in self.live:
            self.look()
            self.live[name] = self._started_again(name)

    def _started_again(self, name: str) -> Prepared:
        settings = self._of_roles.get(name)
        return self.live[name] if settings is None else self.live[name].started_again(settings)

    def switched(self, name: str, role: Role) -> None:
        """Note that an instance has this role, with those of the role's settings that need no other process."""
        self._of_roles[name] = settings = self.role_config.settings_for(str(role))
        self.live[name] = self.live[name].switched(role, settings)

    def look(self) -> bool:
        """Take over the roles that others ordered for instances; return whether there were any."""
        found = False
        for name, instance in self.live.items():
            role = remembered_role(self.directory, name)
            if role is not None and role != instance.options.role:
                self.switched(name, role)
                found = True
        return found

    def gateway_config(self, config: DeploymentConfig) -> str:
        """The gateway's configuration as JSON: ``config`` with the present instances.

        The cluster key stays in the gateway's environment.
        """
        whole = change_config(config, {"gateway": {"instances": None}})
        if config.cluster_key is not None:
            whole = change_config(whole, {"cluster_key": None})
        urls = {name: self.spec(name).url for name in self.live}
        whole = change_config(whole, {"gateway": {"instances": urls}})
        return whole.model_dump_json(exclude_unset=True)

    def write_gateway_file(self, config: DeploymentConfig) -> Path:
        """Write the gateway's file, replacing it in one step."""
        file = self.directory / GATEWAY_FILE
        new = file.with_suffix(".part")
        new.unlink(missing_ok=True)
        try:
            new.touch(mode=0o600)  # it may hold the API key
            new.write_text(self.gateway_config(config), encoding="utf-8")  # JSON is YAML
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        return file


def resolved(config: DeploymentConfig) -> DeploymentConfig:
    """Return the config with its engine chosen and with absolute paths: the gateway reads it elsewhere."""
    config = choose_engine(choose_layout(config).config).config
    changes: dict[str, Any] = {}
    if config.trace is not None:
        changes["trace"] = str(config.trace.absolute())
    if config.gateway.access_log not in (None, "-"):
        changes["gateway"] = {"access_log": str(Path(config.gateway.access_log or "").absolute())}
    return change_config(config, changes) if changes else config
