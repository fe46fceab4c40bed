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
from epd_serve.config.options import OF_PROCESS
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

#: Subdirectory of the MPS daemon, and its time to end.
_MPS, _MPS_GRACE_S = "mps", 3.0

#: Starts this program. -P: do not import "device" or "proxy" from the user's directory.
PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")


@dataclass(frozen=True, kw_only=True)
class PreparedInstance:
    """A native instance before its start.

    Attributes:
        variables: environment variables for its devices.
        group: roles of the instances in its parentheses; () outside parentheses.
        deployment: the options common to all instances.
        chose_threads, chose_memory: whether its threads, and its part of the device's memory, only follow from the
            number of instances.
    """

    placement: InstancePlacement
    options: InstanceOptions
    variables: Mapping[str, str]
    group: tuple[str, ...]
    deployment: str
    chose_threads: bool
    chose_memory: bool

    #: Possible roles; None: all.
    roles: ClassVar[None] = None

    @property
    def kind(self) -> Hashable:
        """Everything that the process cannot change."""
        chosen = {"threads"} if self.chose_threads else set()
        chosen |= {"memory_share"} if self.chose_memory else set()
        own = self.options.model_dump_json(include={*OF_PROCESS, "device_share"} - chosen)
        return self.placement.devices, self.group, own, self.deployment, tuple(sorted(self.variables.items()))

    @property
    def settings(self) -> str:
        """The settings that change with its role."""
        return self.options.model_dump_json(include=InstanceSettings.model_fields.keys() - OF_PROCESS)

    def switched(self, role: Role, settings: InstanceSettings) -> PreparedInstance:
        """Return the same process in another role."""
        return replace(self, options=self.options.with_settings(role, settings))

    def spec(self, config: DeploymentConfig, environment: Mapping[str, str]) -> ProcessSpec:
        """Return its process; ``environment`` comes from :func:`with_trust`."""
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
    """Return the native instances of ``placement``, those of one machine, in its order.

    ``directory``: for files that instances on one device share; None: they share none. ``master``: address of the
    deployment's mooncake_master. Raises ValueError for a missing model, or for an NPU with too few streams or
    graph tasks.
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
            device_share=share,
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
    sharing: dict[str, dict[str, InstanceUse]] = {}
    for one in prepared:
        for npu in (device for device in one.placement.devices if device.startswith("npu:")):
            sharing.setdefault(npu, {})[one.placement.name] = _npu_use(one.options)
    for uses in sharing.values():
        check_colocation(uses)
    return tuple(prepared)


def with_trust(config: DeploymentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the cluster key and the paths of the certificates.

    Processes started later get the same key even if its file has changed.
    """
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
    """Return the environment, with the variables of a new MPS daemon if shares of GPUs need one and none runs.

    ``directory``: for the daemon's files. Raises ValueError if it cannot be started.
    """
    if not _parts_gpus(config, placement) or mps.is_running(environment):
        return dict(environment)
    return {**environment, **mps.own_daemon(directory / _MPS, environment)}


def check_mps(
    config: DeploymentConfig, environment: Mapping[str, str], placement: Sequence[InstancePlacement]
) -> None:
    """Raise ValueError if a running deployment would get shares of a GPU without MPS."""
    if _parts_gpus(config, placement) and not mps.is_running(environment):
        raise ValueError("shares of a GPU need MPS, which is not running; restart the deployment")


def mps_spec(environment: Mapping[str, str], directory: Path) -> ProcessSpec | None:
    """Return the process that runs the daemon of :func:`with_mps`, if any."""
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
    """Return a sentence on MPS for processes that share GPUs; "" without any."""
    shared = [one for one in placement if one.shares_device_with and one.devices[0].startswith("cuda:")]
    if not shared:
        return ""
    if mps.is_running(environment):
        return f"MPS: on, by the daemon in {mps.pid_file(environment).parent}"
    if _parts_gpus(config, placement):
        return f"MPS: 'epd-serve up' starts it for the shares of GPUs; by hand: {mps.PIPES}=DIR {mps.CONTROL} -d"
    where = ", ".join(dict.fromkeys(device for one in shared for device in one.devices))
    return f"MPS: off, so the instances on {where} take turns; set shares, as in instances: {{share: 0.5}}"


def instance_specs(
    config: DeploymentConfig, ports: Ports, environment: Mapping[str, str], directory: Path | None = None
) -> tuple[ProcessSpec, ...]:
    """Return a process for each instance of a deployment on one machine; see :func:`prepare_instances`."""
    master = master_address(config, ports)
    prepared = prepare_instances(config, config.placement(), ports.instances, environment, directory, master)
    environment = with_trust(config, environment)
    return tuple(instance.spec(config, environment) for instance in prepared)


def master_address(config: DeploymentConfig, ports: Ports) -> str | None:
    """Return the address of the deployment's own mooncake_master, if any."""
    return f"{config.instances.host}:{ports.master[0]}" if ports.master else None


def master_spec(config: DeploymentConfig, ports: Ports, environment: Mapping[str, str]) -> ProcessSpec | None:
    """Return the process of the deployment's own mooncake_master, if any.

    Raises ValueError if the deployment needs mooncake, which is missing.
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
    """Return the gateway's process.

    Args:
        listener: descriptor of the socket that listens at ``port``, which later gateways inherit, too.
        config_file: ``config`` with command-line changes and the instances by name.
        environment: result of :func:`with_trust`.
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
        # wait for an encoder, or P would load the tower for the first image
        first_health="/health?role=EPD" if any(one.role.encodes for one in config.placement()) else "/health",
        stops="first",
        grace_s=config.instances.drain_s + 1.5,
    )


def autoscale_spec(config_file: Path, environment: Mapping[str, str], admin: Path) -> ProcessSpec:
    """Return the process of ``epd-serve autoscale``; see :func:`gateway_spec` for the arguments."""
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


def _device_boards(placement: Sequence[InstancePlacement], directory: Path) -> dict[str, str]:
    """Return ``path:slot`` by name for instances in parentheses that combine an encoder and a language model."""
    boards: dict[str, str] = {}
    for instance in placement:
        group = sorted((instance.name, *instance.shares_device_with))
        members = [member for member in placement if member.name in group]
        encodes = any(member.role.encodes for member in members)
        if len(group) > 1 and encodes and any(member.role.has_language_model for member in members):
            boards[instance.name] = f"{directory / f'device-{group[0]}'}:{group.index(instance.name)}"
    return boards


def hccl_variables(placement: InstancePlacement) -> dict[str, str]:
    """Return the variables of an instance on NPUs; none on other devices."""
    return hccl_environment(placement.index) if placement.devices[0].startswith("npu:") else {}


def _npu_use(options: InstanceOptions) -> InstanceUse:
    """Return the streams and graph tasks of an instance on an NPU."""
    if not options.role.has_language_model:
        return InstanceUse(num_streams=1)
    assert isinstance(options.model, Path)
    config = read_model_config(options.model)
    text = config.get("text_config", config)
    return InstanceUse(
        num_streams=2,  # the default one, and one for graph updates
        num_graphs=len(decode_graph_sizes(options.sizes.max_num_seqs)) if options.role.decodes else 0,
        num_layers=text["num_hidden_layers"],
    )
