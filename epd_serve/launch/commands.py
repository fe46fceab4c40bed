"""The command lines and environments of a deployment's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from device import mps
from device.ascend_limits import InstanceUse, check_colocation, hccl_environment
from device.present import EMULATED_MEMORY, num_cores, visibility
from epd_serve.config import DeploymentConfig, InstanceOptions, InstanceSettings, decode_graph_sizes
from epd_serve.config.model_files import read_model_config
from epd_serve.config.role_files import OF_PROCESS, with_settings
from epd_serve.config.sections import SharedConfig
from epd_serve.config.shares import DeviceShare
from epd_serve.launch.processes.forking import HEAP_TUNABLES, can_fork
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology import InstancePlacement
from epd_serve.transfer.mooncake.engine import check_installed, master_command
from epd_serve.types import Role

#: The directory of the MPS daemon, below that of the deployment's files, and what it takes to quit.
_MPS, _MPS_GRACE_S = "mps", 3.0

#: How this program is started again. -P: a user's directory is no place to import "device" or "proxy" from.
PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")


@dataclass(frozen=True, kw_only=True)
class PreparedInstance:
    """One native instance of a deployment before there is a process of it.

    Attributes:
        variables: variables that its devices need.
        group: roles of the instances in its parentheses; () outside parentheses.
        deployment: what it has in common with the other instances.
        chose_threads: whether the number of its threads merely follows from that of all instances.
        chose_memory: whether its part of the device's memory merely follows from who else is there.
    """

    placement: InstancePlacement
    options: InstanceOptions
    variables: Mapping[str, str]
    group: tuple[str, ...]
    deployment: str
    chose_threads: bool
    chose_memory: bool

    #: Roles to which it can be switched; None: all.
    roles: ClassVar[None] = None

    @property
    def kind(self) -> Hashable:
        """All that the process keeps for as long as it lives."""
        chosen = {"threads"} if self.chose_threads else set()
        chosen |= {"memory_share"} if self.chose_memory else set()
        own = self.options.model_dump_json(include={*OF_PROCESS, "device_share"} - chosen)
        return self.placement.devices, self.group, own, self.deployment, tuple(sorted(self.variables.items()))

    @property
    def settings(self) -> str:
        """The settings of its role."""
        return self.options.model_dump_json(include=InstanceSettings.model_fields.keys() - OF_PROCESS)

    def switched(self, role: Role, settings: InstanceSettings) -> PreparedInstance:
        """Return the same process in another role."""
        return replace(self, options=with_settings(self.options, role, settings))

    def spec(self, config: DeploymentConfig, environment: Mapping[str, str]) -> ProcessSpec:
        """Its process; ``environment`` as of :func:`with_trust`."""
        options, devices = self.options, self.placement.devices
        return ProcessSpec(
            name=options.name,
            label=f"{options.role} on {', '.join(dict.fromkeys(devices))}",
            command=(*PROGRAM, "instance", "--options", options.to_json(), "--parent-pid", str(os.getpid())),
            environment={
                **({"GLIBC_TUNABLES": HEAP_TUNABLES} if isinstance(config.model, str) else {}),
                **_common(environment),
                **self.variables,
                "OMP_NUM_THREADS": str(options.threads),
                **hccl_variables(self.placement),
            },
            url=url_of(config.instances.host, options.port, tls=config.read_tls() is not None),
            can_fork=can_fork(config, devices),
        )


def prepare_instances(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    directory: Path | None = None,
    master: str | None = None,
) -> tuple[PreparedInstance, ...]:
    """The native instances of ``placement``, those of one machine, in its order.

    ``directory`` takes the files that instances on one device share; without it they know nothing of each other.
    ``master`` is the address of the mooncake_master that the deployment starts. Raises ValueError where the model
    is not there, or an NPU has too few streams or graph tasks.
    """
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    shares, memory = config.device_shares(placement), config.memory_shares(placement)
    boards = _device_boards(placement, directory) if directory else {}
    common = config.model_dump_json(include={"model", *SharedConfig.model_fields})
    roles = {one.name: str(one.role) for one in placement}
    prepared = []
    for instance, port in zip(placement, ports, strict=True):
        share, settings = shares.get(instance.name), config.settings_for(str(instance.role))
        variables, local_devices = visibility(instance.devices, environment)
        threads, core_board = threads_of(instance, settings, num_ranks, environment, share), None
        is_chosen = settings.threads is None and share is None and "OMP_NUM_THREADS" not in environment
        if is_chosen and directory and instance.devices[0] == "cpu":
            threads, core_board = num_cores(), directory / "cores"
        options = config.options_for(
            instance,
            device=local_devices,
            port=port,
            threads=threads,
            master=master,
            share=share,
            memory_share=memory.get(instance.name),
            device_board=boards.get(instance.name),
            core_board=core_board,
            switch_dir=directory,
        )
        if directory and instance.devices[0].startswith("emulated:"):
            variables[EMULATED_MEMORY] = str(directory)
        if share and instance.devices[0].startswith("cuda:"):
            variables |= mps.share_variables(share.share)
        together = (instance.name, *instance.shares_device_with) if instance.shares_device_with else ()
        prepared.append(
            PreparedInstance(
                placement=instance,
                options=options,
                variables=variables,
                group=tuple(sorted(roles[name] for name in together)),
                deployment=common,
                chose_threads=settings.threads is None and share is None,
                chose_memory=settings.memory_share is None,
            )
        )
    _check_npus(prepared)
    return tuple(prepared)


def with_trust(config: DeploymentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the gateway and all instances, with what they know each other by: the cluster's key,
    which they keep even if its file holds another one by now, and the files of their certificates."""
    key, tls = config.read_cluster_key(), config.read_tls()
    return {**environment, **({CLUSTER_KEY: key} if key else {}), **(tls.environment if tls else {})}


def _parts_gpus(config: DeploymentConfig, placement: Sequence[InstancePlacement]) -> bool:
    """Return whether instances have shares of a GPU."""
    shared = [one for one in placement if one.devices[0].startswith("cuda:")]
    shares = config.device_shares(placement) if shared else {}
    return any(one.name in shares for one in shared)


def with_mps(
    config: DeploymentConfig,
    environment: Mapping[str, str],
    directory: Path,
    placement: Sequence[InstancePlacement],
) -> dict[str, str]:
    """The environment, with the variables of an MPS daemon of its own where shares of GPUs need one.

    A daemon that runs already is used. ``directory`` takes the files of the other one. Raises ValueError where it
    cannot be started.
    """
    if not _parts_gpus(config, placement) or mps.is_running(environment):
        return dict(environment)
    return {**environment, **mps.own_daemon(directory / _MPS, environment)}


def check_mps(
    config: DeploymentConfig, environment: Mapping[str, str], placement: Sequence[InstancePlacement]
) -> None:
    """Raise ValueError where a deployment that runs would get shares of a GPU, and MPS does not run."""
    if _parts_gpus(config, placement) and not mps.is_running(environment):
        raise ValueError("shares of a GPU need MPS, which does not run here; start the deployment anew")


def mps_spec(environment: Mapping[str, str], directory: Path) -> ProcessSpec | None:
    """The process that keeps the daemon which :func:`with_mps` has chosen; None: it has chosen none."""
    if environment.get(mps.PIPES) != str(directory / _MPS):
        return None
    return ProcessSpec(
        name="mps",
        label="NVIDIA MPS: shares of GPUs",
        command=(sys.executable, "-P", "-m", "device.mps", str(os.getpid())),
        environment={**environment, "PYTHONUNBUFFERED": "1"},
        ready_file=mps.pid_file(environment),
        stops="last",
        grace_s=_MPS_GRACE_S,
    )


def mps_note(
    config: DeploymentConfig, environment: Mapping[str, str], placement: Sequence[InstancePlacement]
) -> str:
    """Return a sentence on MPS for processes that share GPUs; "" where none do."""
    shared = [one for one in placement if one.shares_device_with and one.devices[0].startswith("cuda:")]
    if not shared:
        return ""
    if mps.is_running(environment):
        return f"MPS: on, by the daemon of {mps.pid_file(environment).parent}"
    if _parts_gpus(config, placement):
        return f"MPS: comes with 'epd-serve up', for the shares of GPUs; by hand: {mps.PIPES}=DIR {mps.CONTROL} -d"
    where = ", ".join(dict.fromkeys(device for one in shared for device in one.devices))
    return f"MPS: off, so the instances on {where} take turns there; write shares, as in instances: {{share: 0.5}}"


def instance_specs(
    config: DeploymentConfig, ports: Ports, environment: Mapping[str, str], directory: Path | None = None
) -> tuple[ProcessSpec, ...]:
    """One process for each instance of a deployment on one machine; as :func:`prepare_instances`."""
    master = master_address(config, ports)
    prepared = prepare_instances(config, config.placement(), ports.instances, environment, directory, master)
    environment = with_trust(config, environment)
    return tuple(instance.spec(config, environment) for instance in prepared)


def master_address(config: DeploymentConfig, ports: Ports) -> str | None:
    """The address of the mooncake_master that belongs to a deployment."""
    return f"{config.instances.host}:{ports.master[0]}" if ports.master else None


def master_spec(config: DeploymentConfig, ports: Ports, environment: Mapping[str, str]) -> ProcessSpec | None:
    """The mooncake_master's process; None where the deployment needs none or names one.

    Raises ValueError where mooncake is missing, also if instances alone need it.
    """
    if config.uses_mooncake:
        check_installed()
    if ports.master is None:
        return None
    port, http_port = ports.master
    command = master_command(config.instances.host, port, http_port)
    return ProcessSpec(
        name="master",
        label="Mooncake Store",
        command=(sys.executable, "-P", "-m", "epd_serve.lifeline", str(os.getpid()), *command),
        environment=environment,
        url=url_of(config.instances.host, http_port),
        stops="last",
    )


def gateway_spec(
    config: DeploymentConfig,
    port: int,
    listener: int,
    config_file: Path,
    environment: Mapping[str, str],
    admin: Path,
) -> ProcessSpec:
    """Return the gateway's process; ``environment`` as of :func:`with_trust`.

    Args:
        port: its port.
        listener: descriptor of the socket that listens there, which the next gateway will have, too.
        config_file: holds ``config``, command-line changes included, with the instances by name.
        admin: the Unix socket of its admin API.
    """
    command = [*PROGRAM, "proxy", "--config", str(config_file), "--admin-path", str(admin)]
    command += ["--host", config.gateway.host, "--port", str(port), "--listener", str(listener)]
    return ProcessSpec(
        name="gateway",
        label="OpenAI API",
        command=(*command, "--parent-pid", str(os.getpid())),
        environment=_common(environment),
        url=url_of(config.gateway.host, port),
        socket=admin,
        pass_fds=(listener,),
        # P encodes where no encoder is ready, and would load the tower for it: the first image finds an encoder.
        first_health="/health?role=EPD" if any(one.role.encodes for one in config.placement()) else "/health",
        stops="first",
        grace_s=config.instances.drain_s + 1.5,
    )


def autoscale_spec(config_file: Path, environment: Mapping[str, str], admin: Path) -> ProcessSpec:
    """The process of ``epd-serve autoscale``; arguments as of :func:`gateway_spec`."""
    command = (*PROGRAM, "autoscale", str(config_file), "--socket", str(admin))
    return ProcessSpec(
        name="autoscale",
        label="roles and plans by load",
        command=(*command, "--parent-pid", str(os.getpid())),
        environment=_common(environment),
        stops="first",
    )


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **environment,
        "HF_HUB_OFFLINE": "1",  # the model is a directory; nothing may be looked up elsewhere
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # a dying process's last words reach its log
        "PYTHONFAULTHANDLER": "1",
    }


def threads_of(
    instance: InstancePlacement,
    settings: InstanceSettings,
    num_ranks: int,
    environment: Mapping[str, str],
    share: DeviceShare | None,
) -> int:
    """The threads of an instance: those that are wished for it, else the number of cores in its share.

    Without a share, the user's OMP_NUM_THREADS if it is a number, else an equal part of the cores this process may
    use.
    """
    wished, given = settings.threads, environment.get("OMP_NUM_THREADS", "")
    if share is not None:
        threads = max(1, round(share.share * num_cores()))
        if wished is None or instance.devices[0] != "cpu":
            return wished or threads
        return min(wished, threads)  # more would take turns on the share's cores
    if wished is not None:
        return wished
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, num_cores() // num_ranks)


def _device_boards(placement: Sequence[InstancePlacement], directory: Path) -> dict[str, str]:
    """``path:slot`` for instances in one pair of parentheses, where one encodes beside a language model."""
    boards: dict[str, str] = {}
    for instance in placement:
        group = sorted((instance.name, *instance.shares_device_with))
        members = [member for member in placement if member.name in group]
        encodes = any(member.role.encodes for member in members)
        if len(group) > 1 and encodes and any(member.role.has_language_model for member in members):
            boards[instance.name] = f"{directory / f'device-{group[0]}'}:{group.index(instance.name)}"
    return boards


def hccl_variables(placement: InstancePlacement) -> dict[str, str]:
    """Variables of an instance on NPUs, none of one on other devices."""
    return hccl_environment(placement.index) if placement.devices[0].startswith("npu:") else {}


def _check_npus(instances: Sequence[PreparedInstance]) -> None:
    """Raise ValueError where the instances on one NPU need more streams or graph tasks than it has."""
    sharing: dict[str, dict[str, InstanceUse]] = {}
    for one in instances:
        for npu in (device for device in one.placement.devices if device.startswith("npu:")):
            sharing.setdefault(npu, {})[one.placement.name] = _use(one.options)
    for uses in sharing.values():
        check_colocation(uses)


def _use(options: InstanceOptions) -> InstanceUse:
    if not options.role.has_language_model:
        return InstanceUse(num_streams=1)
    assert isinstance(options.model, Path), "an NPU is no emulated device"
    config = read_model_config(options.model)
    text = config.get("text_config", config)
    return InstanceUse(
        num_streams=2,  # the default one, and the one on which graphs are updated
        num_graphs=len(decode_graph_sizes(options.sizes.max_num_seqs)) if options.role.decodes else 0,
        num_layers=text["num_hidden_layers"],
    )
