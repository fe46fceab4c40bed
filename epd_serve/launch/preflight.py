"""Find a deployment's faults before any of its processes starts; without torch, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from device.present import accelerators, torch_lacks, visibility
from epd_serve.config import DeploymentConfig, ShapeConfig, model_path
from epd_serve.config.gateway import read_secret
from epd_serve.config.model_files import (
    chat_template,
    check_max_model_len,
    check_model_files,
    check_template,
    read_model_config,
)
from epd_serve.config.sizes import in_binary_units
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.models.families import FAMILIES, QUANTISED, TEXT, refusal
from epd_serve.topology.placement import CPU

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_deployment(config: DeploymentConfig, environment: Mapping[str, str], *, ports: bool = True) -> None:
    """Raise ValueError with a line for each fault of the model, devices, memory and secrets, and for taken ports.

    vLLM is checked when its command lines are made. A dry run skips ``ports``.
    """
    faults = list(_device_faults(config, environment))
    checks: list[Callable[[DeploymentConfig], object]] = [_check_model, _check_secrets]
    for check in [*checks, choose_ports] if ports else checks:
        try:
            check(config)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))


def _check_secrets(config: DeploymentConfig) -> None:
    config.read_cluster_key()
    read_secret(config.gateway.admin.key, "gateway.admin.key")
    if (tls := config.read_tls()) is not None:
        tls.check(config.instances.host)


def _check_model(config: DeploymentConfig) -> None:
    """Raise ValueError for a model that the deployment cannot serve; vLLM checks its own."""
    if isinstance(config.model, ShapeConfig):
        return
    path = model_path(config.model)
    if config.chat_template is not None:
        check_template(chat_template(path, config.chat_template), config.chat_template)
    content = read_model_config(path)
    if content.get("model_type") in TEXT and any(not one.role.has_language_model for one in config.placement()):
        raise ValueError(
            f"topology {config.topology} has a separate E, but models of the family {content['model_type']!r} "
            "take only text; write topology: P-D (--topology P-D), or PD for one instance"
        )
    if config.engine == "vllm":
        _check_memory(config, {"tower": 0, "language": 0}, 0)
        return
    if content.get("model_type") in FAMILIES:
        parts = (content, *(content.get(name) for name in ("text_config", "vision_config", "audio_config")))
        if any(isinstance(part, dict) and part.get("quantization_config") is not None for part in parts):
            raise ValueError(f"{path}: {QUANTISED}")
    elif why := refusal(content):
        raise ValueError(f"{path}: {why}. If vLLM knows it, write engine: vllm (docs/guide/vllm.md)")
    weights = check_model_files(path)
    positions = (content.get("text_config") or content).get("max_position_embeddings")
    for settings in (config.settings_for(str(one.role)) for one in config.placement()):
        if settings.max_model_len is not None and isinstance(positions, int):
            check_max_model_len(settings.max_model_len, positions)
    texts = (content, content.get("text_config") or {})
    saved = next((part[key] for part in texts for key in ("dtype", "torch_dtype") if part.get(key)), "")
    _check_memory(config, weights, _BYTES.get(saved if config.dtype == "auto" else config.dtype, 4))


def _device_faults(config: DeploymentConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each device that this machine or this Python lacks, and for unsupported limits."""
    kinds: dict[str, list[str]] = {}
    for device in dict.fromkeys(device for placed in config.placement() for device in placed.devices):
        kinds.setdefault(device.partition(":")[0], []).append(device)
    for kind, own in kinds.items():
        lack = "" if config.engine == "vllm" or isinstance(config.model, ShapeConfig) else torch_lacks(kind)
        if kind in ("cuda", "npu") and not lack and (reason := accelerators(kind).reason):
            lack = f"{reason}; on this machine write devices: [cpu]"
        if lack:
            yield f"{', '.join(own)}: {lack}"
        for device in own if kind in ("cuda", "npu") and not lack else ():
            count = len(accelerators(kind).memory_bytes)
            try:
                visibility([device], environment)
            except ValueError as error:
                yield str(error)
            else:
                if int(device.partition(":")[2]) >= count:
                    yield f"{device}: this machine has only {kind}:0 to {kind}:{count - 1}"
    for placed in config.placement():
        limited = placed.role.has_language_model and config.settings_for(str(placed.role)).tower_share is not None
        if limited and not placed.devices[0].startswith(("cuda", "emulated")):
            yield f"{placed.name}: {placed.devices[0]} does not support tower_share; remove it"


def _check_memory(config: DeploymentConfig, weights: Mapping[str, int], number_bytes: int) -> None:
    """Raise ValueError for a device without room for the weights and KV caches of its instances."""
    kept: dict[str, int] = {}
    placement = config.placement()
    memory = {} if config.engine == "vllm" else config.memory_shares(placement)
    memory |= {name: share.share for name, share in config.device_shares(placement).items()}
    for placed in placement:
        all_stages = config.resident(placed) == "all"
        parts = {"tower": placed.role.encodes, "language": placed.role.has_language_model}
        held = sum(weights[part] for part, is_held in parts.items() if is_held or all_stages)
        kv_bytes = config.settings_for(str(placed.role)).kv_cache_bytes if parts["language"] else None
        nbytes, device, part = held * number_bytes + (kv_bytes or 0), placed.devices[0], memory.get(placed.name)
        kept[device] = kept.get(device, 0) + nbytes
        room = None if device == CPU or part is None else _memory_of(device)
        if room is not None and part is not None and nbytes > room * part:
            raise ValueError(
                f"{placed.name}: its weights and kv_cache_bytes take {in_binary_units(nbytes)}, more than its "
                f"part ({part:g}) of the {in_binary_units(room)} of {device}; write a larger memory_share (or "
                "share) for its role, a smaller kv_cache_bytes, or more devices"
            )
    for device, nbytes in kept.items():
        room = _memory_of(device)
        if room is not None and nbytes > room:
            raise ValueError(
                f"{device}: the weights and kv_cache_bytes of its instances take {in_binary_units(nbytes)} of "
                f"{in_binary_units(room)}; write a smaller kv_cache_bytes, dtype: auto, a smaller model, or more "
                "devices"
            )


def _memory_of(device: str) -> int | None:
    kind, _, index = device.partition(":")
    if kind != "cpu":
        found = accelerators(kind).memory_bytes
        return found[int(index)] if int(index) < len(found) else None
    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)
