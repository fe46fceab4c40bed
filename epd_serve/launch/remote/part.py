"""The instances of a deployment that run in one place, as that place sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.config.role_files import write_role_settings
from epd_serve.launch.commands import (
    PreparedInstance,
    check_mps,
    mps_spec,
    prepare_instances,
    spec_of,
    with_mps,
    with_trust,
)
from epd_serve.launch.deployment_record import DeploymentRecord, Prepared
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.processes.ports import Ports, ports_each
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.process import prepare_vllm, vllm_spec
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units, split_host
from epd_serve.types import Stage

#: Port of the first instance where the deployment file names none.
BASE_PORT = 8100
#: Indices of devices that are elsewhere: no machine has so many.
_ELSEWHERE = 10_000
#: Beyond the time for requests in progress, until a process is ended by force.
_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some instances of a deployment.

    Attributes:
        config: the whole deployment, in which the devices of this place have the names that they have here.
        placement: the instances of this place.
        names: what they are called at the gateway, by their names in ``placement``.
    """

    config: DeploymentConfig
    placement: tuple[InstancePlacement, ...]
    names: Mapping[str, str]


def unit_part(config: DeploymentConfig, unit: int, name: str | None, replica: int = 0) -> Part:
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
    config = _seen_from(config, [device for one in here for device in one.devices])
    if name is None:
        return _part(config, {one.name: one.name for one in here})
    return _part(config, {one.name: name if len(here) == 1 else f"{name}-{one.name}" for one in here})


def host_part(config: DeploymentConfig, host: str) -> Part:
    """The instances on a host of the deployment file, none where it has no use for the host now.

    At the gateway they are called ``HOST-d0``, ``HOST-d1``. Raises ValueError for another host.
    """
    if host not in config.hosts:
        raise ValueError(f"the file names no host {host!r}; it has: {', '.join(config.hosts) or 'none'}")
    names: dict[str, str] = {}
    for one in config.placement():
        if one.host == host:
            stem = f"{host}-{str(one.role).lower()}"
            names[one.name] = f"{stem}{sum(other.rstrip('0123456789') == stem for other in names.values())}"
    devices = [
        local if name == host or local == CPU else f"{local.rpartition(':')[0]}:{_ELSEWHERE + index}"
        for index, (name, local) in enumerate(map(split_host, config.devices))
    ]
    here = {"hosts": {}, "devices": (CPU,) if set(devices) == {CPU} else tuple(devices)}
    return _part(config.model_copy(update=here), names)


def _part(config: DeploymentConfig, names: Mapping[str, str]) -> Part:
    placement = tuple(one for one in config.placement() if one.name in names)
    return Part(config=choose_engine(config).config, placement=placement, names=names)


def _seen_from(config: DeploymentConfig, here: Sequence[str]) -> DeploymentConfig:
    """The deployment with the devices ``here`` counted from 0, and all others beyond what a machine has."""
    own = list(dict.fromkeys(here))
    devices = [
        device
        if device == CPU
        else f"{device.rpartition(':')[0]}:{own.index(device) if device in own else _ELSEWHERE + index}"
        for index, device in enumerate(config.devices)
    ]
    return config.model_copy(update={"devices": tuple(devices)})


def part_specs(part: Part, host: str, environment: Mapping[str, str], directory: Path) -> tuple[ProcessSpec, ...]:
    """The processes of a part, which listen on ``host``, an MPS daemon first; ``directory`` takes their files.

    Raises ValueError where the model or a package is not there.
    """
    config = at_address(part.config, host)
    if config.starts_master:
        raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
    environment = with_trust(config, part_environment(part, environment))
    environment = with_mps(config, environment, directory, part.names)
    if (tls := config.read_tls()) is not None:
        tls.check(host)
    if config.engine == "vllm":
        prepared_vllm = prepare_vllm(config, part_ports(part), environment, directory, part.names)
        here = [vllm_spec(one, environment) for one in prepared_vllm if one.placement.name in part.names]
        named = [
            replace(one, name=part.names[placed.name]) for placed, one in zip(part.placement, here, strict=True)
        ]
    else:
        write_role_settings(directory, config)
        named = [spec_of(config, one, environment) for one in prepare_part(part, host, environment, directory)]
    daemon = mps_spec(environment, directory)
    return (
        *([] if daemon is None else [daemon]),
        *(for_agent(config, one, str(placed.role)) for placed, one in zip(part.placement, named, strict=True)),
    )


def prepare_part(
    part: Part, host: str, environment: Mapping[str, str], directory: Path
) -> tuple[PreparedInstance, ...]:
    """The native instances of a part, with the names that they have at the gateway; else as :func:`part_specs`."""
    ports = Ports(gateway=0, instances=part_ports(part))
    environment = part_environment(part, environment)
    prepared = prepare_instances(at_address(part.config, host), ports, environment, directory, part.names)
    return tuple(
        replace(one, options=one.options.model_copy(update={"name": part.names[one.placement.name]}))
        for one in prepared
        if one.placement.name in part.names
    )


def at_address(config: DeploymentConfig, host: str) -> DeploymentConfig:
    """The deployment with instances that listen on ``host``. Raises ValueError for a wildcard."""
    if is_wildcard(host):
        raise ValueError(
            f"{host} is no address that others could reach; write that of this machine, --host 10.0.0.7"
        )
    return config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})


def part_environment(part: Part, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part's processes, which have this machine's cores between them."""
    num_ranks = sum(one.tensor_parallel for one in part.placement)
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // max(1, num_ranks))), **environment}


def for_agent(config: DeploymentConfig, spec: ProcessSpec, role: str) -> ProcessSpec:
    """A process as an agent runs it: it may take the time to finish what it has."""
    return replace(spec, can_fork=False, grace_s=config.settings_for(role).drain_s + _GRACE_S)


@dataclass(slots=True, kw_only=True)
class HostRecord(DeploymentRecord):
    """The instances of one host, as its agent runs them. ``config`` is the whole deployment, at its address."""

    host: str

    def prepare(self, config: DeploymentConfig) -> Sequence[Prepared]:
        if config.engine == "vllm":
            raise ValueError("vLLM's instances of a host follow no file; start its agent anew")
        part = host_part(config, self.host)
        check_mps(part.config, self.environment, part.names)
        return prepare_part(part, config.instances.host, self.environment, self.directory)

    def elsewhere(self, config: DeploymentConfig) -> Counter[Stage]:
        return Counter(stage for one in config.placement() if one.host != self.host for stage in one.role.stages)

    def spec_of(self, instance: Prepared) -> ProcessSpec:
        spec = DeploymentRecord.spec_of(self, instance)  # slots make it another class than super() knows
        return for_agent(self.config, spec, str(instance.options.role))


def part_ports(part: Part) -> tuple[int, ...]:
    """A port for each instance of the deployment; those of this part are the first ones."""
    base, step = part.config.instances.base_port or BASE_PORT, ports_each(part.config)
    own = [one.name for one in part.placement]
    return tuple(base + own.index(one.name) * step if one.name in own else base for one in part.config.placement())
