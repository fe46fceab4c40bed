"""The instances' processes of a deployment with ``engine: vllm``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast
from zlib import crc32

from device.ascend_limits import hccl_environment
from device.present import visibility
from device.shares import share_environment
from epd_serve import lifeline
from epd_serve.backends.vllm_command import Connectors, VllmOptions, command_of, environment_of
from epd_serve.config import DeploymentConfig, InstanceSettings, model_path
from epd_serve.config.shares import DeviceShare
from epd_serve.config.vllm import connectors
from epd_serve.launch.commands import measured, threads_each
from epd_serve.launch.process import ProcessSpec
from epd_serve.launch.vllm_probe import CONNECTORS, VllmFound, check_flags, check_found, probe_vllm
from epd_serve.protocol.addresses import is_loopback, url_of
from epd_serve.topology import InstancePlacement
from epd_serve.types import Stage

Kind = Literal["cpu", "cuda", "npu"]
#: Keys of ``instances`` and the flags of vllm serve that mean the same.
_SAME = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "num_blocks": "num_gpu_blocks_override",
}
#: Of a device's memory where nothing else is said, as vLLM's own default.
_ALL_MEMORY = 0.92
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class VllmProcess:
    """The process of one instance: its command and variables, and its devices as the deployment names them."""

    placement: InstancePlacement
    command: tuple[str, ...]
    variables: dict[str, str]
    port: int


def connectors_of(config: DeploymentConfig) -> Connectors:
    """The connectors that the topology needs: those of the file, else those that suit the devices."""
    vllm = config.vllm
    prefill = config.settings_for("P")
    features, kv = connectors(config.placement(), vllm)
    return Connectors(
        features=features,
        kv=kv,
        feature_dir=str(vllm.feature_dir) if vllm.feature_dir else "",
        kv_load_failure=vllm.kv_load_failure,
        group_layers=vllm.group_layers,
        store_bytes=config.settings_for("E").feature_store_bytes,
        cache_bytes=prefill.feature_cache_bytes,
        feature_timeout_s=prefill.feature_timeout_s,
        widths=(_width(config, Stage.PREFILL), _width(config, Stage.DECODE)),
        trace=str(config.trace) if config.trace else None,
        rewrites=vllm.media == "rewritten",
    )


def vllm_processes(
    config: DeploymentConfig,
    ports: Sequence[int],
    environment: Mapping[str, str],
    plugin_path: str = "",
    *,
    flags: Collection[str] = (),
    model: str | None = None,
    names: Mapping[str, str] | None = None,
) -> list[VllmProcess]:
    """The processes in placement order; ``ports`` are theirs.

    ``plugin_path`` is a directory from which vLLM's Python can import epd_serve; "" where it is installed there.
    ``flags`` are those that vLLM is known to have. ``model`` is the model's directory where it need not be on this
    machine. ``names``: what to call instances that have other names elsewhere, by their names in the placement.
    Raises ValueError where the model must be here and is not.
    """
    model = model or str(model_path(config.checkpoint))
    used = connectors_of(config)
    if used.features == "file" and not used.feature_dir:
        raise ValueError("vllm.feature_dir is not set: a directory through which E hands its features to P")
    media = media_flags(Path(model), flags)
    placement = config.placement()
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    shares = config.device_shares()
    processes = []
    for number, (instance, port) in enumerate(zip(placement, ports, strict=True)):
        share = shares.get(instance.name)
        settings = config.settings_for(str(instance.role))
        threads = threads_each(num_ranks, environment, share)
        if settings.threads is not None:  # more would take turns on the share's cores
            on_a_share = share is not None and _kind(instance.devices[0]) == "cpu"
            threads = min(settings.threads, threads) if on_a_share else settings.threads
        options = _options(
            config, settings, instance, number, port, used, environment, threads, share, model, media
        )
        if other := (names or {}).get(instance.name):
            options = replace(options, name=other, number=crc32(other.encode()))
        variables = environment_of(options)
        if options.kind == "npu":
            variables |= hccl_environment(number)
        if used.kv == "nixl" and is_loopback(options.host):
            variables["UCX_NET_DEVICES"] = "lo"  # it would listen on every interface
        if plugin_path:
            variables["PYTHONPATH"] = plugin_path
        if share is not None and options.kind == "cuda":
            variables |= share_environment(share.share)
        processes.append(
            VllmProcess(
                placement=instance,
                command=command_of(options),
                variables={**variables, **config.vllm.environment},
                port=port,
            )
        )
    return processes


def vllm_specs(
    config: DeploymentConfig, processes: Sequence[VllmProcess], environment: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    """The processes for the supervisor; each ends with this process, and its engine processes with it."""
    # As a script it loads nothing else, of which its waiting half would keep a copy.
    tie = (sys.executable, "-IS", lifeline.__file__, "--group", str(os.getpid()))
    return tuple(
        ProcessSpec(
            name=process.placement.name,
            label=f"{process.placement.role} on {', '.join(dict.fromkeys(process.placement.devices))}, vLLM",
            command=(*tie, *process.command),
            environment={**environment, **process.variables},
            url=url_of(config.instances.host, process.port),
            grace_s=_GRACE_S,
            measures=measured(process.placement.devices),
        )
        for process in processes
    )


def vllm_instance_specs(
    config: DeploymentConfig,
    ports: Sequence[int],
    environment: Mapping[str, str],
    directory: Path,
    names: Mapping[str, str] | None = None,
) -> tuple[ProcessSpec, ...]:
    """The processes that the supervisor runs, after a check of the vLLM in their environment.

    ``directory`` takes the files that another Python needs to find epd_serve. Raises ValueError that names what is
    missing.
    """
    found = check_engine(config)
    plugin_path = "" if found.epd_serve else link_plugin(directory / "plugin")
    processes = vllm_processes(config, ports, environment, plugin_path, flags=found.flags, names=names)
    return vllm_specs(config, processes, environment)


def check_engine(config: DeploymentConfig) -> VllmFound:
    """The vLLM that a deployment will run on. Raises ValueError where it cannot, NoVllm where there is none."""
    python = config.vllm.python or sys.executable
    found = probe_vllm(python)
    used = connectors_of(config)
    kinds = {_kind(device) for instance in config.placement() for device in instance.devices}
    needs = [used.kv] if used.kv in ("mooncake", "nixl") else []
    check_found(
        found,
        python=python,
        connectors=own_connectors(used),
        needs=[*needs, *(["vllm_ascend"] if "npu" in kinds else [])],
    )
    roles = {str(instance.role) for instance in config.placement()}
    check_flags(found, {flag for role in roles for flag in config.settings_for(role).engine_args})
    return found


def own_connectors(used: Connectors) -> list[str]:
    """The connectors in use that are epd-serve's own."""
    own = [one for one in (used.features, used.kv) if one in CONNECTORS]
    return [*own, *(["rewritten"] if used.rewrites else [])]


def _options(
    config: DeploymentConfig,
    settings: InstanceSettings,
    instance: InstancePlacement,
    number: int,
    port: int,
    used: Connectors,
    environment: Mapping[str, str],
    threads: int,
    share: DeviceShare | None,
    model: str,
    defaults: Mapping[str, bool],
) -> VllmOptions:
    kind = _kind(instance.devices[0])
    shown, _ = visibility(instance.devices, environment)
    given: dict[str, Any] = {
        flag: getattr(settings, key)
        for key, flag in _SAME.items()
        if key in settings.model_fields_set and getattr(settings, key) is not None
    }
    if config.generation_config != "auto":
        given["generation_config"] = "vllm" if config.generation_config == "off" else config.generation_config
    memory = settings.memory_share or (share.share * _ALL_MEMORY if share else None)
    if memory is None and instance.shares_device_with:
        memory = _ALL_MEMORY / (1 + len(instance.shares_device_with))
    return VllmOptions(
        name=instance.name,
        role=instance.role,
        python=str(config.vllm.python or sys.executable),
        model=model,
        served_model_name=config.model_name,
        host=config.instances.host,
        port=port,
        number=number,
        kind=kind,
        visible="".join(shown.values()),
        tensor_parallel=instance.tensor_parallel,
        dtype=config.dtype if "dtype" in config.model_fields_set else "auto",
        memory_share=None if memory is None else round(memory, 3),
        kv_bytes=settings.kv_cache_bytes or (config.vllm.cpu_kv_cache_bytes if kind == "cpu" else None),
        threads=threads,
        cores=_cores(share) if share is not None and kind == "cpu" else "",
        connectors=used,
        arguments={**defaults, **given, **settings.engine_args},
    )


def _width(config: DeploymentConfig, stage: Stage) -> int:
    """Tensor-parallel ranks of the widest instance of a stage."""
    return max([one.tensor_parallel for one in config.placement() if stage in one.role.stages], default=1)


def _cores(share: DeviceShare) -> str:
    """The cores of a share, as in ``4,5,6``."""
    cores = sorted(os.sched_getaffinity(0))
    first = min(len(cores) - 1, round(share.start * len(cores)))
    return ",".join(map(str, cores[first : first + max(1, round(share.share * len(cores)))]))


def _kind(device: str) -> Kind:
    return cast(Kind, device.partition(":")[0])


def link_plugin(directory: Path) -> str:
    """Make ``directory`` one from which another Python can import epd_serve and no more; returns it."""
    import device
    import epd_serve

    directory.mkdir(parents=True, exist_ok=True)
    for package in (epd_serve, device):
        assert package.__file__ is not None
        link, source = directory / package.__name__, Path(package.__file__).resolve().parent
        if link.is_symlink() and link.readlink() != source:  # of an installation that was here before
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(source)
    # With it vLLM finds the plugin as that of an installed package.
    facts = directory / f"epd_serve-{epd_serve.__version__}.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epd-serve\nVersion: {epd_serve.__version__}\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nepd_serve = epd_serve.vllm_plugin:register\n")
    return str(directory)


_OPTIONS_FLAG = "trust_request_mm_kwargs"
_PIXEL_FLAG = "mm_device_do_normalize"
_KEYS = ("do_normalize", "do_rescale", "image_mean", "image_std")


def media_flags(model: Path, flags: Collection[str]) -> dict[str, bool]:
    """Flags of vllm serve with which it takes the gateway's options of videos, which has limits for them, and with
    which transformers normalises pixels, where the model's files leave it to it.

    ``flags`` are those that the installed vLLM has.
    """
    found = {_OPTIONS_FLAG: True} if _OPTIONS_FLAG in flags else {}
    image_processor = _read(model / "preprocessor_config.json")
    processor = _read(model / "processor_config.json").get("image_processor") or {}
    told = any(key in image_processor or key in processor for key in _KEYS)
    if _PIXEL_FLAG in flags and (image_processor or processor) and not told:
        found[_PIXEL_FLAG] = False
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
