"""The instances of a deployment that run in one place, as that place sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.launch.commands import with_trust
from epd_serve.launch.deployment_record import DeploymentRecord, Prepared
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.processes.ports import Ports, ports_each
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.process import VllmProcess
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units
from epd_serve.types import Stage

#: Port of the first instance where the deployment file names none.
BASE_PORT = 8100
#: Beyond the time for requests in progress, until a process is ended by force.
_GRACE_S = 5.0

#: Finds the instances of a deployment in one place, with the names that they have at the gateway and the devices
#: that they have there. Raises ValueError where the deployment has no such place.
Place = Callable[[DeploymentConfig], tuple[InstancePlacement, ...]]


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
    return _renamed(here, {one.name: name if len(here) == 1 else f"{name}-{one.name}" for one in here})


def host_placement(config: DeploymentConfig, host: str) -> tuple[InstancePlacement, ...]:
    """The instances on a host of the deployment file, none where it has no use for the host now.

    At the gateway they are called ``HOST-d0``, ``HOST-d1``. Raises ValueError for another host.
    """
    if host not in config.hosts:
        raise ValueError(f"the file names no host {host!r}; it has: {', '.join(config.hosts) or 'none'}")
    here = tuple(one for one in config.placement() if one.host == host)
    names: dict[str, str] = {}
    for one in here:
        stem = f"{host}-{str(one.role).lower()}"
        names[one.name] = f"{stem}{sum(other.rstrip('0123456789') == stem for other in names.values())}"
    return _renamed(here, names)


def _renamed(here: Sequence[InstancePlacement], names: Mapping[str, str]) -> tuple[InstancePlacement, ...]:
    return tuple(
        replace(
            one, name=names[one.name], shares_device_with=tuple(names[other] for other in one.shares_device_with)
        )
        for one in here
    )


def at_address(config: DeploymentConfig, host: str) -> DeploymentConfig:
    """The deployment with instances that listen on ``host``. Raises ValueError for a wildcard."""
    if is_wildcard(host):
        raise ValueError(
            f"{host} is no address that others could reach; write that of this machine, --host 10.0.0.7"
        )
    return config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})


@dataclass(slots=True, kw_only=True)
class PartRecord(DeploymentRecord):
    """The instances of one place, as its agent runs them. ``config`` is the whole deployment, at its address."""

    place: Place

    @classmethod
    def of(
        cls, config: DeploymentConfig, place: Place, host: str, environment: Mapping[str, str], directory: Path
    ) -> PartRecord:
        """Prepare the record of instances that will listen on ``host``; ``directory`` takes their files.

        Raises ValueError where there is no such place, or the deployment cannot be run in parts.
        """
        config = at_address(choose_engine(config).config, host)
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

    def placement(self, config: DeploymentConfig) -> Sequence[InstancePlacement]:
        return self.place(config)

    def prepare(self, config: DeploymentConfig) -> Sequence[Prepared]:
        if config.engine == "vllm":
            raise ValueError("vLLM's instances of a host follow no file; start its agent anew")
        return DeploymentRecord.prepare(self, config)  # slots make it another class than super() knows

    def elsewhere(self, config: DeploymentConfig) -> Counter[Stage]:
        here, every = self.placement(config), config.placement()
        return Counter(stage for one in every for stage in one.role.stages) - Counter(
            stage for one in here for stage in one.role.stages
        )

    def spec_of(self, instance: Prepared) -> ProcessSpec:
        """As an agent runs it: it may take the time to finish what it has, and vLLM's has a number of its own."""
        options = instance.options
        if isinstance(instance, VllmProcess):
            numbered = replace(instance.options, number=crc32(options.name.encode()))
            instance = replace(instance, options=numbered)
        spec = DeploymentRecord.spec_of(self, instance)
        grace_s = self.config.settings_for(str(options.role)).drain_s + _GRACE_S
        return replace(spec, can_fork=False, grace_s=grace_s)
