"""The instances of a deployment that run in one place, as that place sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device.present import num_cores
from epd_serve.config import DeploymentConfig
from epd_serve.config.role_files import write_role_settings
from epd_serve.launch.commands import prepare_instances, spec_of, with_trust
from epd_serve.launch.engine_choice import choose_engine
from epd_serve.launch.ports import Ports, ports_each
from epd_serve.launch.process import ProcessSpec
from epd_serve.launch.vllm import vllm_instance_specs
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU, place_units, split_host

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


def unit_part(config: DeploymentConfig, unit: int, name: str) -> Part:
    """One replica of a unit of the topology, on devices that are counted from 0.

    ``name`` is that of its instance at the gateway; of several it is what theirs begin with.
    Raises ValueError where the topology has no such unit.
    """
    units = place_units(config.topology, config.devices)
    if not 0 <= unit < len(units):
        raise ValueError(f"topology {config.topology} has units 0 to {len(units) - 1}; there is no unit {unit}")
    here = units[unit][0]
    config = _seen_from(config, [device for one in here for device in one.devices])
    named = {one.name: name if len(here) == 1 else f"{name}-{one.name}" for one in here}
    return _part(config, named)


def host_part(config: DeploymentConfig, host: str) -> Part:
    """The instances on a host of the deployment file. Raises ValueError where there are none."""
    names = {one.name: one.name for one in config.placement() if one.host == host}
    if host not in config.hosts or not names:
        raise ValueError(f"no instance is on a host {host!r}; the file has: {', '.join(config.hosts) or 'none'}")
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
    """The processes of a part, which listen on ``host``; ``directory`` takes their files.

    Raises ValueError where the model or a package is not there.
    """
    config = part.config
    config = config.model_copy(update={"instances": config.instances.model_copy(update={"host": host})})
    if is_wildcard(host):
        raise ValueError(
            f"{host} is no address that others could reach; write that of this machine, --host 10.0.0.7"
        )
    if config.starts_master:
        raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
    num_ranks = sum(one.tensor_parallel for one in part.placement)
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)), **environment}
    environment = with_trust(config, environment)
    if (tls := config.read_tls()) is not None:
        tls.check(host)
    ports = Ports(gateway=0, instances=part_ports(part))
    if config.engine == "vllm":
        specs = vllm_instance_specs(config, ports.instances, environment, directory, part.names)
        here = [spec for spec in specs if spec.name in part.names]
    else:
        write_role_settings(directory, config)
        here = [
            spec_of(
                config,
                replace(one, options=one.options.model_copy(update={"name": part.names[one.placement.name]})),
                environment,
            )
            for one in prepare_instances(config, ports, environment, directory)
            if one.placement.name in part.names
        ]
    return tuple(
        replace(
            spec,
            name=part.names[one.name],
            can_fork=False,
            grace_s=config.settings_for(str(one.role)).drain_s + _GRACE_S,
        )
        for one, spec in zip(part.placement, here, strict=True)
    )


def part_ports(part: Part) -> tuple[int, ...]:
    """A port for each instance of the deployment; those of this part are the first ones."""
    base, step = part.config.instances.base_port or BASE_PORT, ports_each(part.config)
    own = [one.name for one in part.placement]
    return tuple(base + own.index(one.name) * step if one.name in own else base for one in part.config.placement())
