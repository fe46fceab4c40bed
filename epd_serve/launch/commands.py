"""The command lines and environments of a deployment's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device import mps
from device.ascend_limits import InstanceUse, check_colocation, hccl_environment
from device.present import EMULATED_MEMORY, num_cores, visibility
from device.weight_files import COPIES, VARIABLE, to_variable
from epd_serve.config import DeploymentConfig, InstanceOptions, ShapeConfig, decode_graph_sizes
from epd_serve.config.model_files import read_model_config
from epd_serve.config.shares import DeviceShare
from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology import InstancePlacement
from epd_serve.transfer.mooncake.engine import check_installed, master_command

#: How an instance's heap is kept: in huge pages (weights are read faster), one heap for all threads, and nothing
#: given back between steps, which would only fault it in again. A user's own GLIBC_TUNABLES take its place.
HEAP_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1" + "".join(
    f":glibc.malloc.{limit}_threshold={1 << 30}" for limit in ("mmap", "trim")
)

#: The directory of the MPS daemon, below that of the deployment's files, and what it takes to quit.
_MPS, _MPS_GRACE_S = "mps", 3.0

#: How this program is started again. -P: a user's directory is no place to import "device" or "proxy" from.
PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")


@dataclass(frozen=True, kw_only=True)
class PreparedInstance:
    """One instance of a deployment before there is a process of it.

    Attributes:
        variables: variables that its devices need. own_variables: those that no other process may have.
        chose_threads: whether the number of its threads merely follows from that of all instances.
        chose_memory: whether its part of the device's memory merely follows from who else is there.
    """

    placement: InstancePlacement
    options: InstanceOptions
    variables: Mapping[str, str]
    own_variables: Mapping[str, str]
    chose_threads: bool
    chose_memory: bool


def prepare_instances(
    config: DeploymentConfig,
    ports: Ports,
    environment: Mapping[str, str],
    directory: Path | None = None,
    here: Collection[str] | None = None,
) -> tuple[PreparedInstance, ...]:
    """Each instance in placement order. Raises ValueError where the model is not there.

    ``directory`` takes the files that instances on one device share; without it they know nothing of each other.
    ``here``: names of the instances whose devices ``environment`` may limit; None: of all.
    """
    placement = config.placement()
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    master = f"{config.instances.host}:{ports.master[0]}" if ports.master else None
    shares = _shares(config)
    boards = _device_boards(placement, directory) if directory else {}
    chosen = []
    for instance, port in zip(placement, ports.instances, strict=True):
        share = shares.get(instance.name)
        threads = threads_each(num_ranks, environment, share)
        if (wished := config.settings_for(str(instance.role)).threads) is not None:
            on_a_share = share is not None and instance.devices[0] == "cpu"
            threads = min(wished, threads) if on_a_share else wished  # more would take turns on the share's cores
        limits = environment if here is None or instance.name in here else {}
        visible, local_devices = visibility(instance.devices, limits)
        options = config.options_for(
            instance,
            device=local_devices,
            port=port,
            threads=threads,
            master=master,
            share=share,
            device_board=boards.get(instance.name),
            switch_dir=directory,
        )
        if directory and instance.devices[0].startswith("emulated:"):
            visible[EMULATED_MEMORY] = str(directory)
        if share and instance.devices[0].startswith("cuda:"):
            visible |= mps.share_variables(share.share)
        chosen.append((instance, options, visible, wished is None and share is None))
    own = npu_environments([(instance, options) for instance, options, _, _ in chosen])
    return tuple(
        PreparedInstance(
            placement=instance,
            options=options,
            variables=variables,
            own_variables=own_variables,
            chose_threads=chose_threads,
            chose_memory=config.settings_for(str(instance.role)).memory_share is None,
        )
        for (instance, options, variables, chose_threads), own_variables in zip(chosen, own, strict=True)
    )


def with_trust(config: DeploymentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the gateway and all instances, with what they know each other by: the cluster's key,
    which they keep even if its file holds another one by now, and the files of their certificates."""
    key, tls = config.read_cluster_key(), config.read_tls()
    return {**environment, **({CLUSTER_KEY: key} if key else {}), **(tls.environment if tls else {})}


def _shares(config: DeploymentConfig) -> dict[str, DeviceShare]:
    return config.device_shares(InterferenceMatrix.read(config.interference) if config.interference else None)


def parts_gpus(config: DeploymentConfig, names: Collection[str] | None = None) -> bool:
    """Whether instances, among them one with these names in the placement (None: any), have shares of a GPU."""
    shared = [one for one in config.placement() if one.devices[0].startswith("cuda:")]
    shares = _shares(config) if shared else {}
    return any(one.name in shares and (names is None or one.name in names) for one in shared)


def with_mps(
    config: DeploymentConfig,
    environment: Mapping[str, str],
    directory: Path,
    names: Collection[str] | None = None,
) -> dict[str, str]:
    """The environment, with the variables of an MPS daemon of its own where shares of GPUs need one.

    A daemon that runs already is used. ``directory`` takes the files of the other one. ``names``: as
    :func:`parts_gpus`. Raises ValueError where it cannot be started.
    """
    if not parts_gpus(config, names) or mps.is_running(environment):
        return dict(environment)
    return {**environment, **mps.own_daemon(directory / _MPS, environment)}


def check_mps(
    config: DeploymentConfig, environment: Mapping[str, str], names: Collection[str] | None = None
) -> None:
    """Raise ValueError where a deployment that runs would get shares of a GPU, and MPS does not run."""
    if parts_gpus(config, names) and not mps.is_running(environment):
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
    config: DeploymentConfig, environment: Mapping[str, str], names: Collection[str] | None = None
) -> str:
    """Whether processes that share GPUs compute at once there; "": none of ``names`` (None: of all) does."""
    shared = [
        one
        for one in config.placement()
        if one.shares_device_with and one.devices[0].startswith("cuda:") and (names is None or one.name in names)
    ]
    if not shared:
        return ""
    if mps.is_running(environment):
        return f"MPS: on, by the daemon of {mps.pid_file(environment).parent}, which goes on when this ends"
    if parts_gpus(config, names):
        return f"MPS: comes with 'epd-serve up', for the shares of GPUs; by hand: {mps.PIPES}=DIR {mps.CONTROL} -d"
    where = ", ".join(dict.fromkeys(device for one in shared for device in one.devices))
    return f"MPS: off, so the instances on {where} take turns there; write shares, as in instances: {{share: 0.5}}"


def spec_of(config: DeploymentConfig, instance: PreparedInstance, environment: Mapping[str, str]) -> ProcessSpec:
    """The process of an instance; ``environment`` as of :func:`with_trust`."""
    options, devices = instance.options, instance.placement.devices
    return ProcessSpec(
        name=options.name,
        label=f"{options.role} on {', '.join(dict.fromkeys(devices))}",
        command=(*PROGRAM, "instance", "--options", options.to_json(), "--parent-pid", str(os.getpid())),
        environment={
            **({"GLIBC_TUNABLES": HEAP_TUNABLES} if isinstance(config.model, str) else {}),
            **_common(environment),
            **instance.variables,
            "OMP_NUM_THREADS": str(options.threads),
            **instance.own_variables,
        },
        url=url_of(config.instances.host, options.port, tls=config.read_tls() is not None),
        can_fork=config.instances.preload and (set(devices) == {"cpu"} or isinstance(config.model, ShapeConfig)),
        measures=measured(devices),
    )


def measured(devices: Iterable[str]) -> frozenset[str]:
    """The devices whose free memory an instance measures when it starts."""
    return frozenset(device for device in devices if device.startswith(("cuda", "npu")))


def instance_specs(
    config: DeploymentConfig, ports: Ports, environment: Mapping[str, str], directory: Path | None = None
) -> tuple[ProcessSpec, ...]:
    """One process for each instance; as :func:`prepare_instances`."""
    prepared = prepare_instances(config, ports, environment, directory)
    environment = with_trust(config, environment)
    return tuple(spec_of(config, instance, environment) for instance in prepared)


def shared_parts(config: DeploymentConfig, *, later: bool = False) -> list[str]:
    """The parts of the model that several CPU instances hold, or may come to hold, if they share them.

    ``later``: also with instances that are added while it runs.
    """
    if later and (config.instances.share_weights or config.keeps_other_roles):
        return ["tower", "language_model"]
    roles = [placed.role for placed in config.placement() if set(placed.devices) == {"cpu"}]
    if config.keeps_other_roles and len(roles) > 1:
        return ["tower", "language_model"]
    if not config.instances.share_weights:
        return []
    holders = {
        "tower": sum(role.encodes for role in roles),
        "language_model": sum(role.has_language_model for role in roles),
    }
    return [part for part, count in holders.items() if count > 1]


def sharing_weights(
    specs: Sequence[ProcessSpec], files: Mapping[str, int], *, copies: bool = False
) -> tuple[ProcessSpec, ...]:
    """The instances with these memory files, by part of the model, to keep their weights in.

    Args:
        copies: instances that begin with a language model have one of their own: decode steps read all of it.
    """
    if not files:
        return tuple(specs)
    variables = {VARIABLE: to_variable(files), **({COPIES: "language_model"} if copies else {})}
    return tuple(
        replace(spec, environment={**spec.environment, **variables}, descriptors=tuple(files.values()))
        for spec in specs
    )


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
    ports: Ports,
    config_file: Path,
    environment: Mapping[str, str],
    admin: Path | None = None,
) -> ProcessSpec:
    """The gateway's process; ``environment`` as of :func:`with_trust`.

    ``config_file`` holds ``config``, command-line changes included, with the instances by name; ``admin`` is the
    socket of the gateway's admin API.
    """
    command = [*PROGRAM, "proxy", "--config", str(config_file)]
    if admin is not None:
        command += ["--admin-path", str(admin)]
    command += ["--host", config.gateway.host, "--port", str(ports.gateway), "--parent-pid", str(os.getpid())]
    return ProcessSpec(
        name="gateway",
        label="OpenAI API",
        command=tuple(command),
        environment=_common(environment),
        url=url_of(config.gateway.host, ports.gateway),
        # P encodes where no encoder is ready, and would load the tower for it: the first image finds an encoder.
        first_health="/health?role=EPD" if any(one.role.encodes for one in config.placement()) else "/health",
        stops="first",
        grace_s=config.gateway.shutdown_delay_s + config.gateway.shutdown_grace_s + 1.5,
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


def threads_each(num_ranks: int, environment: Mapping[str, str], share: DeviceShare | None) -> int:
    """The threads of an instance: the number of cores in its share.

    Without a share, the user's OMP_NUM_THREADS if it is a number, else an equal part of the cores this process may
    use.
    """
    if share is not None:
        return max(1, round(share.share * num_cores()))
    wished = environment.get("OMP_NUM_THREADS", "")
    if wished.isdecimal() and int(wished) > 0:
        return int(wished)
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


def npu_environments(
    instances: Sequence[tuple[InstancePlacement, InstanceOptions]],
) -> list[dict[str, str]]:
    """Variables for each instance's process; empty for those on other devices.

    Raises ValueError where the instances on one NPU need more streams or graph tasks than it has.
    """
    sharing: dict[str, dict[str, InstanceUse]] = {}
    environments: list[dict[str, str]] = []
    for index, (placed, options) in enumerate(instances):
        npus = [device for device in placed.devices if device.startswith("npu:")]
        environments.append(hccl_environment(index) if npus else {})
        for npu in npus:
            sharing.setdefault(npu, {})[placed.name] = _use(options)
    for uses in sharing.values():
        check_colocation(uses)
    return environments


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
        num_groups=int(len(options.devices) > 1),
    )
