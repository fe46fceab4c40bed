"""``epd-serve up --dry-run``: what would be started, as lines for a shell or another supervisor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from epd_serve.backends.vllm_command import shell_line
from epd_serve.config import DeploymentConfig, model_path
from epd_serve.config.keys import CLUSTER_KEY
from epd_serve.config.model_files import check_model_files
from epd_serve.launch.commands import instance_specs
from epd_serve.launch.ports import Ports, instance_urls
from epd_serve.launch.vllm import check_engine, vllm_processes
from epd_serve.launch.vllm_probe import NoVllm

_PARENT = "--parent-pid"


def dry_run(config: DeploymentConfig, file: Path | None, environment: Mapping[str, str]) -> Iterator[str]:
    """Lines: a comment and a command for each process. Nothing is started.

    ``file`` is the deployment file, None for the default deployment. A model that is not there is a comment for
    vLLM, whose lines do not depend on it. Raises ValueError where the native engine's is not there, the ports are
    not fixed, or this machine's vLLM does not fit.
    """
    ports = tuple(int(url.rpartition(":")[2]) for _, url in instance_urls(config))
    shown = str(file) if file else "DEPLOYMENT.yaml"
    yield f"# {config.topology} on {', '.join(config.devices)}, engine: {config.engine}"
    if config.engine == "vllm":
        yield from _vllm(config, ports, environment)
    else:
        check_model_files(model_path(config.model))
        for spec in instance_specs(config, Ports(gateway=config.gateway.port, instances=ports), environment):
            own = {name: value for name, value in spec.environment.items() if environment.get(name) != value}
            if own.pop(CLUSTER_KEY, None) is not None:
                yield f"# {CLUSTER_KEY}: the deployment's cluster_key, in the environment"
            command = spec.command[: spec.command.index(_PARENT)] if _PARENT in spec.command else spec.command
            yield f"\n# {spec.name}: {spec.label}"
            yield shell_line(command, own)
    yield f"\n# gateway: OpenAI API at http://{config.gateway.host}:{config.gateway.port}/v1"
    yield shell_line(("epd-serve", "proxy", "--config", shown), {})


def _vllm(config: DeploymentConfig, ports: tuple[int, ...], environment: Mapping[str, str]) -> Iterator[str]:
    path, flags = "", list[str]()
    try:
        found = check_engine(config)
        flags = found.flags
        yield f"# vLLM {found.vllm}" + (f", vllm-ascend {found.vllm_ascend}" if found.vllm_ascend else "")
        if not found.epd_serve:
            path = "PLUGIN_PATH"
            yield "# PLUGIN_PATH: a directory with the packages epd_serve and device, or install epd-serve there"
    except NoVllm as error:
        yield f"# not checked on this machine: {error}"
    try:
        model = str(model_path(config.model))
    except ValueError as error:
        model = str(Path(config.model).expanduser().resolve())
        yield f"# not on this machine: {error}"
    for process in vllm_processes(config, ports, environment, path, flags=flags, model=model):
        placed = process.placement
        yield f"\n# {placed.name}: {placed.role} on {', '.join(dict.fromkeys(placed.devices))}"
        yield shell_line(process.command, process.variables)
