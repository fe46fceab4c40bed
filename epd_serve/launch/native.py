"""The processes of instances with ``engine: native``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device import mps
from device.ascend_environment import hccl_environment
from device.present import EMULATED_MEMORY, num_cores, visibility
from epd_serve.config import DeploymentConfig, InstanceSettings
from epd_serve.config.options import OF_PROCESS
from epd_serve.config.sections import SharedConfig
from epd_serve.config.shares import DeviceShare
from epd_serve.launch.processes.forking import HEAP_TUNABLES, can_fork
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.protocol.addresses import url_of
from epd_serve.topology import InstancePlacement
from epd_serve.topology.change import Part
from epd_serve.types import Role

#: Starts this program. -P: do not import "device" or "proxy" from the user's directory.
PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")


@dataclass(frozen=True, kw_only=True)
class PreparedInstance:
    """An instance before its start, or a running one in its current role.

    Attributes:
        part: its role, what its process cannot change, and the settings of its role; for :func:`plan_change`.
    """

    placement: InstancePlacement
    port: int
    spec: ProcessSpec
    part: Part

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def role(self) -> Role:
        return self.part.role

    def switched(self, role: Role, config: DeploymentConfig) -> PreparedInstance:
        """Return the same process in another role."""
        settings = None if self.part.settings is None else role_settings(config, role)
        return replace(self, part=replace(self.part, role=role, settings=settings))


def role_settings(config: DeploymentConfig, role: Role) -> str:
    """Return the settings that change with the role of a native instance."""
    return config.settings_for(str(role)).model_dump_json(
        include=InstanceSettings.model_fields.keys() - OF_PROCESS
    )


def prepare_native(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    directory: Path | None = None,
    master: str | None = None,
) -> list[PreparedInstance]:
    """Return the native instances of ``placement``, those of one machine, in its order.

    ``directory``: for files that instances on one device share; None: they share none. ``master``: address of the
    deployment's mooncake_master. Raises ValueError for a missing model.
    """
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    shares, memory = config.device_shares(placement), config.memory_shares(placement)
    common = config.model_dump_json(include={"model", *SharedConfig.model_fields})
    by_name = {one.name: one for one in placement}
    prepared = []
    for instance, port in zip(placement, ports, strict=True):
        share, settings = shares.get(instance.name), config.settings_for(str(instance.role))
        variables, local_devices = visibility(instance.devices, environment)
        threads, core_board = threads_of(instance, settings, num_ranks, environment, share), None
        is_chosen = settings.threads is None and share is None and "OMP_NUM_THREADS" not in environment
        if is_chosen and directory and instance.devices[0] == "cpu":
            threads, core_board = num_cores(), directory / "cores"
        names = sorted((instance.name, *instance.shares_device_with)) if instance.shares_device_with else []
        roles, device_board = [by_name[name].role for name in names], None
        if directory and any(one.encodes for one in roles) and any(one.has_language_model for one in roles):
            device_board = f"{directory / f'device-{names[0]}'}:{names.index(instance.name)}"
        options = config.options_for(
            instance,
            device=local_devices,
            port=port,
            threads=threads,
            master=master,
            device_share=share,
            memory_share=memory.get(instance.name),
            device_board=device_board,
            core_board=core_board,
            switch_dir=directory,
        )
        if directory and instance.devices[0].startswith("emulated:"):
            variables[EMULATED_MEMORY] = str(directory)
        if share and instance.devices[0].startswith("cuda:"):
            variables |= mps.share_variables(share.share)
        spec = ProcessSpec(
            name=instance.name,
            label=f"{instance.role} on {', '.join(dict.fromkeys(instance.devices))}",
            command=(*PROGRAM, "instance", "--options", options.to_json()),
            environment={
                **({"GLIBC_TUNABLES": HEAP_TUNABLES} if isinstance(config.model, str) else {}),
                **program_environment(environment),
                **variables,
                "OMP_NUM_THREADS": str(options.threads),
                **hccl_variables(instance),
            },
            url=url_of(config.instances.host, port, tls=config.read_tls() is not None),
            can_fork=can_fork(config, instance.devices),
        )
        # options that follow from the number of instances, which may change
        follows = {"threads"} if settings.threads is None and share is None else set()
        follows |= {"memory_share"} if settings.memory_share is None else set()
        own = options.model_dump_json(include={*OF_PROCESS, "device_share"} - follows)
        part = Part(
            name=instance.name,
            role=instance.role,
            kind=(instance.devices, *sorted(map(str, roles)), own, common, *sorted(variables.items())),
            settings=role_settings(config, instance.role),
            devices=instance.devices,
        )
        prepared.append(PreparedInstance(placement=instance, port=port, spec=spec, part=part))
    return prepared


def program_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this program's processes."""
    return {
        **environment,
        "HF_HUB_OFFLINE": "1",  # the model is a local directory
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # the last lines of a dying process reach its log
        "PYTHONFAULTHANDLER": "1",
    }


def threads_of(
    instance: InstancePlacement,
    settings: InstanceSettings,
    num_ranks: int,
    environment: Mapping[str, str],
    share: DeviceShare | None,
) -> int:
    """Return the threads of an instance: the configured number, otherwise the number of cores in its share.

    Without a share: OMP_NUM_THREADS, otherwise an equal part of the cores available to this process.
    """
    wished, given = settings.threads, environment.get("OMP_NUM_THREADS", "")
    if share is not None:
        threads = max(1, round(share.share * num_cores()))
        if wished is None or instance.devices[0] != "cpu":
            return wished or threads
        return min(wished, threads)  # more would only take turns on the share's cores
    if wished is not None:
        return wished
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, num_cores() // num_ranks)


def hccl_variables(placement: InstancePlacement) -> dict[str, str]:
    """Return the variables of an instance on NPUs; none on other devices."""
    return hccl_environment(placement.index) if placement.devices[0].startswith("npu:") else {}
