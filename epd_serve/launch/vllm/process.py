"""The processes of instances with ``engine: vllm``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast
from zlib import crc32

from device import mps
from device.present import visibility
from epd_serve.backends.vllm_command import (
    Connectors,
    VllmOptions,
    command_of,
    environment_of,
)
from epd_serve.config import DeploymentConfig, model_path
from epd_serve.config.shares import DeviceShare
from epd_serve.config.sizes import StepSizes
from epd_serve.launch.native import PreparedInstance, hccl_variables, threads_of
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import STORE, VllmFound, check_found, find_vllm
from epd_serve.protocol.addresses import is_loopback, url_of
from epd_serve.topology import InstancePlacement
from epd_serve.topology.change import Part
from epd_serve.topology.placement import CPU

#: Keys of ``instances`` and the equivalent flags of vllm serve.
_SAME = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
#: vLLM's default fraction of a device's memory.
_ALL_MEMORY = 0.92
_GRACE_S = 10.0
#: Variable with the directory in which E and P of several machines exchange features as files.
FEATURE_DIR = "EPD_SERVE_FEATURE_DIR"


def connectors_of(config: DeploymentConfig, feature_dir: str = "") -> Connectors:
    """Return the connectors that the topology needs; ``feature_dir``: for features as files."""
    prefill = config.settings_for("P")
    return replace(
        Connectors.between(config.placement(), config.vllm.kv),
        feature_dir=feature_dir,
        store_bytes=config.settings_for("E").feature_cache_bytes or StepSizes().feature_cache_bytes,
        cache_bytes=prefill.feature_cache_bytes or StepSizes().feature_cache_bytes,
        feature_timeout_s=prefill.peer_timeout_s,
    )


def vllm_processes(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    plugin_path: str = "",
    feature_dir: str = "",
    *,
    found: Mapping[str, VllmFound] | None = None,
    model: str | None = None,
) -> list[PreparedInstance]:
    """Return the processes of ``placement``, the instances of one machine, in its order.

    Args:
        plugin_path: directory from which a Python without epd_serve can import it.
        feature_dir: directory in which E and P exchange features as files.
        found: the vLLM of each interpreter, if known.
        model: directory of a model that need not be on this machine.

    Raises ValueError for a missing model.
    """
    model = model or str(model_path(config.checkpoint))
    used = connectors_of(config, feature_dir)
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    shares = config.device_shares(placement)
    processes = []
    for instance, port in zip(placement, ports, strict=True):
        share, settings = shares.get(instance.name), config.settings_for(str(instance.role))
        python, kind = config.vllm.python_of(str(instance.role)), instance.devices[0].partition(":")[0]
        engine = (found or {}).get(python)
        flags: dict[str, Any] = media_flags(Path(model)) if engine is not None and engine.release >= STORE else {}
        flags |= {
            flag: value
            for key, flag in _SAME.items()
            if key in settings.model_fields_set and (value := getattr(settings, key)) is not None
        }
        memory = settings.memory_share or (share.share * _ALL_MEMORY if share else None)
        if memory is None and instance.shares_device_with:
            memory = _ALL_MEMORY / (1 + len(instance.shares_device_with))
        options = VllmOptions(
            name=instance.name,
            role=instance.role,
            python=python,
            model=model,
            served_model_name=config.model_name,
            host=config.instances.host,
            port=port,
            number=instance.index if is_loopback(config.instances.host) else crc32(instance.name.encode()),
            kind=cast(Literal["cpu", "cuda", "npu"], kind),
            visible="".join(visibility(instance.devices, environment)[0].values()),
            tensor_parallel=instance.tensor_parallel,
            dtype=config.dtype,
            chat_template=config.chat_template,
            memory_share=None if memory is None else round(memory, 3),
            kv_bytes=settings.kv_cache_bytes,
            threads=threads_of(instance, settings, num_ranks, environment, share),
            cores=_cores(share) if share is not None and kind == "cpu" else "",
            connectors=used,
            tls=config.read_tls(),
            arguments={**flags, **settings.engine_args},
        )
        own = {}
        if used.kv == "nixl" and is_loopback(options.host):
            own["UCX_NET_DEVICES"] = "lo"  # it would listen on every interface
        if plugin_path and engine is not None and not engine.epd_serve:
            own["PYTHONPATH"] = plugin_path
        if share is not None and options.kind == "cuda":
            own |= mps.share_variables(share.share)
        spec = ProcessSpec(
            name=instance.name,
            label=f"{instance.role} on {', '.join(dict.fromkeys(instance.devices))}, vLLM",
            command=command_of(options),
            environment={**environment, **environment_of(options), **hccl_variables(instance), **own},
            url=url_of(options.host, port, tls=options.tls is not None),
            grace_s=_GRACE_S,
            is_group=True,
            measures=frozenset(instance.devices) - {CPU} if options.kv_bytes is None else frozenset(),
        )
        alike = replace(options, name="", port=0, number=0)
        if settings.threads is None and share is None:  # it only follows from the number of instances
            alike = replace(alike, threads=0)
        if settings.memory_share is None and share is None:
            alike = replace(alike, memory_share=None)
        variables = {**environment_of(alike), **hccl_variables(replace(instance, index=0)), **own}
        part = Part(
            name=instance.name,
            role=instance.role,
            kind=(instance.devices, command_of(alike), *sorted(variables.items())),
            devices=instance.devices,
            roles=used.roles_of(instance.role),
        )
        processes.append(PreparedInstance(placement=instance, port=port, spec=spec, part=part))
    return processes


def prepare_vllm(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    directory: Path,
) -> list[PreparedInstance]:
    """Check the vLLM of each interpreter, and return the processes in placement order.

    ``directory``: for files by which another Python finds epd_serve. Raises ValueError for anything missing.
    """
    found = check_engines(config)
    has_all = all(one.epd_serve for one in found.values())
    plugin_path = "" if has_all else link_plugin(directory / "plugin")
    feature_dir = environment.get(FEATURE_DIR) or str(directory / "features")
    return vllm_processes(config, placement, ports, environment, plugin_path, feature_dir, found=found)


def check_engines(config: DeploymentConfig) -> dict[str, VllmFound]:
    """Return the vLLM of each interpreter of a deployment.

    Raises ValueError if one cannot run its instances, NoVllm if it is missing.
    """
    needs: dict[str, set[str]] = {}
    used = connectors_of(config)
    for one in config.placement():
        own = needs.setdefault(config.vllm.python_of(str(one.role)), set())
        if used.kv is not None and used.moves_kv(one.role):
            own.add(used.kv)
        if used.features == "store" and (str(one.role) == "E" or used.takes_features(one.role)):
            own.add("store")
        if any(device.startswith("npu:") for device in one.devices):
            own.add("vllm_ascend")
    engines = {python: find_vllm(python) for python in needs}
    for python, found in engines.items():
        check_found(found, python=python, needs=needs[python])
    return engines


def engine_names(engines: Mapping[str, VllmFound]) -> str:
    """Return text such as ``vLLM 0.23.0, vllm-ascend 0.23.0 and vLLM 0.33.0``."""
    names = (
        f"vLLM {one.vllm}" + (f", vllm-ascend {one.vllm_ascend}" if one.vllm_ascend else "")
        for one in engines.values()
    )
    return " and ".join(dict.fromkeys(names))


def _cores(share: DeviceShare) -> str:
    """Return the cores of a share, as in ``4,5,6``."""
    cores = sorted(os.sched_getaffinity(0))
    first = min(len(cores) - 1, round(share.start * len(cores)))
    return ",".join(map(str, cores[first : first + max(1, round(share.share * len(cores)))]))


def link_plugin(directory: Path) -> str:
    """Prepare ``directory`` for another Python to import only epd_serve from; return it."""
    import device
    import epd_serve

    directory.mkdir(parents=True, exist_ok=True)
    for package in (epd_serve, device):
        assert package.__file__ is not None
        link, source = directory / package.__name__, Path(package.__file__).resolve().parent
        if link.is_symlink() and link.readlink() != source:  # of an earlier installation
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(source)
    # lets vLLM find the plugin
    facts = directory / f"epd_serve-{epd_serve.__version__}.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epd-serve\nVersion: {epd_serve.__version__}\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nepd_serve = epd_serve.vllm_plugin:register\n")
    return str(directory)


def media_flags(model: Path) -> dict[str, bool]:
    """Return vLLM's flags for media: it accepts a request's processor options, which the gateway limits.

    transformers normalises pixels if the model's files do not say how.
    """
    processors = [_read(model / "preprocessor_config.json")]
    processors.append(_read(model / "processor_config.json").get("image_processor") or {})
    says_how = any({"do_normalize", "do_rescale", "image_mean", "image_std"} & one.keys() for one in processors)
    own = {} if says_how or not any(processors) else {"mm_device_do_normalize": False}
    return {"trust_request_mm_kwargs": True, **own}


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
