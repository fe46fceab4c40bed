"""``epd-serve up --dry-run``: what would be started, as lines for a shell or another supervisor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from epd_serve.backends.vllm_command import shell_line
from epd_serve.config import DeploymentConfig, model_path
from epd_serve.config.model_files import beside
from epd_serve.launch.commands import instance_specs, mps_note
from epd_serve.launch.deployment_record import resolved
from epd_serve.launch.preflight import device_faults
from epd_serve.launch.processes.ports import Ports, choose_ports, instance_urls
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import NoVllm, VllmFound
from epd_serve.launch.vllm.process import check_engines, connectors_of, engine_names, vllm_processes
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import CLUSTER_KEY

_PARENT = "--parent-pid"


def dry_run(
    config: DeploymentConfig, file: Path | None, environment: Mapping[str, str], engine_reason: str = ""
) -> Iterator[str]:
    """Lines: a comment and a command for each process. Nothing is started.

    ``file`` is the deployment file, None for the default deployment; ``engine_reason`` says why its engine was
    chosen. What this machine lacks for vLLM is a comment: its lines may be for another machine. The native
    engine's deployment has been checked before.
    Raises ValueError where this machine's vLLM does not fit, or a port is taken.
    """
    config = resolved(config)
    ports, note = _ports(config)
    shown = str(file) if file else "DEPLOYMENT.yaml"
    why = f" ({engine_reason})" if engine_reason else ""
    yield f"# {config.topology} on {', '.join(config.devices)}, engine: {config.engine}{why}"
    if note_on_mps := mps_note(config, environment):
        yield f"# {note_on_mps}"
    if config.engine == "vllm":
        yield from note
        yield from _vllm(config, ports.instances, environment)
    else:
        yield from process_lines(instance_specs(config, ports, environment), environment)
    yield f"\n# gateway: OpenAI API at http://{config.gateway.host}:{ports.gateway}/v1"
    yield shell_line(("epd-serve", "proxy", "--config", shown, *_instances(config, ports)), {})


def process_lines(specs: Iterable[ProcessSpec], environment: Mapping[str, str]) -> Iterator[str]:
    """A comment and a command for each process, with the variables that ``environment`` lacks."""
    for spec in specs:
        own = {name: value for name, value in spec.environment.items() if environment.get(name) != value}
        if own.pop(CLUSTER_KEY, None) is not None:
            yield f"# {CLUSTER_KEY}: the deployment's cluster_key, in the environment"
        command = spec.command[: spec.command.index(_PARENT)] if _PARENT in spec.command else spec.command
        yield f"\n# {spec.name}: {spec.label}"
        yield shell_line(command, own)


def _ports(config: DeploymentConfig) -> tuple[Ports, list[str]]:
    """The ports, and a note on those of vLLM that this machine lacks: its lines may be for another one."""
    try:
        return choose_ports(config), []
    except ValueError as error:
        if config.engine != "vllm" or not config.instances.base_port:
            raise
        numbers = tuple(int(url.rpartition(":")[2]) for _, url in instance_urls(config))
        return Ports(gateway=config.gateway.port, instances=numbers), [f"# not on this machine: {error}"]


def _instances(config: DeploymentConfig, ports: Ports) -> Iterator[str]:
    """The flags that name the instances to a gateway whose file does not say where they are."""
    if config.instances.base_port or config.gateway.instances is not None:
        return
    for placed, port in zip(config.placement(), ports.instances, strict=True):
        yield from (
            "--instance",
            f"{placed.name}={url_of(config.instances.host, port, tls=config.read_tls() is not None)}",
        )


def _vllm(config: DeploymentConfig, ports: tuple[int, ...], environment: Mapping[str, str]) -> Iterator[str]:
    path, found = "", dict[str, VllmFound]()
    for fault in device_faults(config, environment):
        yield f"# not on this machine: {fault}"
    try:
        found = check_engines(config)
        yield f"# {engine_names(found)}"
        if not all(one.epd_serve for one in found.values()):
            path = "PLUGIN_PATH"
            yield "# PLUGIN_PATH: a directory with the packages epd_serve and device, or install epd-serve there"
    except NoVllm as error:
        yield f"# not checked on this machine: {error}"
    try:
        model = str(model_path(config.checkpoint))
    except ValueError as error:
        model = beside(config.checkpoint, Path.cwd())
        yield f"# not on this machine: {error}"
    shared = ""
    if connectors_of(config).features == "file":
        shared = "FEATURE_DIR"
        yield "# FEATURE_DIR: a directory that E and P share"
    for process in vllm_processes(
        config, config.placement(), ports, environment, path, shared, found=found, model=model
    ):
        placed = process.placement
        yield f"\n# {placed.name}: {placed.role} on {', '.join(dict.fromkeys(placed.devices))}"
        yield shell_line(process.command, process.variables)
