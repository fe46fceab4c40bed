"""``epd-serve up --dry-run``: print the commands of a deployment, for a shell or another supervisor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from epd_serve.backends.vllm_command import shell_line
from epd_serve.config import DeploymentConfig, model_path
from epd_serve.config.model_files import resolve_model_name
from epd_serve.launch.choices import resolve
from epd_serve.launch.native import PreparedInstance, prepare_native
from epd_serve.launch.preflight import check_deployment
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.record import mps_note, with_trust
from epd_serve.launch.vllm.installed import NoVllm, VllmFound
from epd_serve.launch.vllm.process import check_engines, connectors_of, engine_names, vllm_processes
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.transfer.mooncake.engine import master_command


def dry_run(config: DeploymentConfig, file: Path | None, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a comment on each choice, and a comment and a command for each process.

    ``file``: None for the default deployment. vLLM's lines may be for another machine, so a comment names what
    this one lacks. Ports may be in use, as by the running deployment. Raises ValueError if this machine cannot run
    the native instances, or its vLLM is unsuitable.
    """
    config, reasons = resolve(config)
    if config.engine == "native":
        check_deployment(config, environment, ports=False)
    yield from (f"# {reason}" for reason in reasons)
    ports, placement = choose_ports(config, check=False), config.placement()
    yield f"# {config.topology} on {', '.join(config.devices)}, engine: {config.engine}"
    if note_on_mps := mps_note(config, environment, placement):
        yield f"# {note_on_mps}"
    given, prepared = with_trust(config, environment), list[PreparedInstance]()
    if config.engine == "vllm":
        yield from _prepare_vllm(config, ports.instances, given, prepared)
    else:
        master = None
        if ports.master is not None:
            master = f"{config.instances.host}:{ports.master[0]}"
            yield "\n# master: Mooncake Store"
            yield shell_line(tuple(master_command(config.instances.host, *ports.master)), {})
        prepared += prepare_native(config, placement, ports.instances, given, master=master)
    for spec in (instance.spec for instance in prepared):
        own = {name: value for name, value in spec.environment.items() if environment.get(name) != value}
        yield f"\n# {spec.name}: {spec.label}"
        if own.pop(CLUSTER_KEY, None) is not None:
            yield f"# {CLUSTER_KEY}: the deployment's cluster_key, in the environment"
        yield shell_line(spec.command, own)
    yield f"\n# gateway: OpenAI API at http://{config.gateway.host}:{ports.gateway}/v1"
    flags = ["--config", str(file) if file else "DEPLOYMENT.yaml"]
    if not config.instances.base_port and config.gateway.instances is None:
        tls = config.read_tls() is not None
        for placed, port in zip(placement, ports.instances, strict=True):
            flags += ["--instance", f"{placed.name}={url_of(config.instances.host, port, tls=tls)}"]
    yield shell_line(("epd-serve", "proxy", *flags), {})


def _prepare_vllm(
    config: DeploymentConfig,
    ports: Sequence[int],
    environment: Mapping[str, str],
    prepared: list[PreparedInstance],
) -> Iterator[str]:
    """Fill ``prepared``; yield comments on missing packages and files, and on words to replace."""
    path, shared, found = "", "", dict[str, VllmFound]()
    try:
        found = check_engines(config)
        yield f"# {engine_names(found)}"
        if not all(one.epd_serve for one in found.values()):
            path = "PLUGIN_PATH"
            yield "# PLUGIN_PATH: a directory with the packages epd_serve and device; or install epd-serve there"
    except NoVllm as error:
        yield f"# not checked on this machine: {error}"
    try:
        model = str(model_path(config.checkpoint))
    except ValueError as error:
        model = resolve_model_name(config.checkpoint, Path.cwd())
        yield f"# not on this machine: {error}"
    if connectors_of(config).features == "file":
        shared = "FEATURE_DIR"
        yield "# FEATURE_DIR: a directory that E and P share"
    placement = config.placement()
    prepared += vllm_processes(config, placement, ports, environment, path, shared, found=found, model=model)
