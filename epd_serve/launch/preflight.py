"""Faults of a deployment that this machine shows before a process of it starts; without torch, in milliseconds."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from device.datasheets import emulated_kind, emulated_sheet
from device.present import accelerators, torch_lacks, visibility
from epd_serve.config import DeploymentConfig, InstanceSettings, ShapeConfig, model_path
from epd_serve.config.gateway import read_secret
from epd_serve.config.model_files import check_max_model_len, check_model_files, read_model_config
from epd_serve.config.sizes import blocks_in, in_binary_units, tokens_per_block
from epd_serve.cost.shape import LanguageShape, ModelShape, shape_from_config, shape_of
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.vllm.installed import find_vllm
from epd_serve.models.families import FAMILIES, QUANTISED, TEXT, refusal
from epd_serve.topology import InstancePlacement

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_deployment(config: DeploymentConfig, environment: Mapping[str, str]) -> None:
    """Raise ValueError with a line for each fault of the model, and of this machine's devices, memory and ports.

    vLLM itself is checked where its command lines are made.
    """
    faults: list[str] = []
    try:
        checkpoint = _check_model(config)
    except ValueError as error:
        faults.append(str(error))
        checkpoint = None
    faults += device_faults(config, environment)
    if checkpoint is not None and not faults:
        faults += _memory_faults(config, *checkpoint)
    for check in (_check_secrets, _check_tls, choose_ports):
        try:
            check(config)
        except ValueError as error:
            faults.append(str(error))
    faults += _file_faults(config)
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))


def _check_secrets(config: DeploymentConfig) -> None:
    """Raise ValueError where a secret is not where the file says."""
    gateway = config.gateway
    config.read_cluster_key()
    read_secret(gateway.api_key, "gateway.api_key")
    read_secret(gateway.admin.key, "gateway.admin.key")


def _check_tls(config: DeploymentConfig) -> None:
    if (tls := config.read_tls()) is not None:
        tls.check(config.instances.host)


def _file_faults(config: DeploymentConfig) -> Iterator[str]:
    """A sentence for each file that is not there, and each directory that cannot be written to."""
    if config.trace is not None and (lack := _unwritable(config.trace)):
        yield f"trace: {lack}"
    log = config.gateway.access_log
    if log not in (None, "-") and (lack := _unwritable(Path(log or "").parent)):
        yield f"gateway.access_log: {lack}"


def _unwritable(directory: Path) -> str:
    """The reason why there can be no files in a directory that may have to be made; "" where there can."""
    there = next(one for one in (directory.absolute(), *directory.absolute().parents) if one.exists())
    if not there.is_dir():
        return f"{there} is a file; name a directory"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there} cannot be written to ({error.strerror}); name another directory"


def _check_model(config: DeploymentConfig) -> tuple[dict[str, int], LanguageShape | None, int]:
    """(weights of each part, the language model's sizes, bytes of a number); 0 and None where vLLM reads it.

    Raises ValueError for a model that the engine cannot serve as the deployment has it.
    """
    if isinstance(config.model, ShapeConfig):
        return _check_shape(config, shape_of(config.model.shape_of))
    path = model_path(config.model)
    if config.engine == "vllm":
        return {"tower": 0, "language": 0}, None, 0
    content = read_model_config(path)
    _check_family(path, content)
    weights = check_model_files(path)
    positions = (content.get("text_config") or content).get("max_position_embeddings")
    for settings in (config.settings_for(str(one.role)) for one in config.placement()):
        if settings.max_model_len is not None and isinstance(positions, int):
            check_max_model_len(settings.max_model_len, positions)
    if content["model_type"] in TEXT and any(not one.role.has_language_model for one in config.placement()):
        raise ValueError(
            f"topology {config.topology} has E by itself, and the family {content['model_type']!r} takes text "
            f"alone: there is nothing to encode; write topology: P-D (--topology P-D), or PD for one instance"
        )
    try:
        language = shape_from_config(content, path.name).language
    except ValueError:  # transformers has the sizes that are left out
        return weights, None, _BYTES.get(config.dtype, 2)
    number_bytes = _BYTES[_dtype(config, content)]
    for instance in config.placement():
        if instance.role.has_language_model:
            _check_kv(instance, config.settings_for(str(instance.role)), language, number_bytes)
    return weights, language, number_bytes


def _check_shape(config: DeploymentConfig, shape: ModelShape) -> tuple[dict[str, int], LanguageShape, int]:
    for instance in config.placement():
        if instance.role.has_language_model:
            _check_kv(instance, config.settings_for(str(instance.role)), shape.language, shape.value_bytes)
    weights = {"tower": shape.vision.parameters if shape.vision else 0, "language": shape.language.parameters}
    return weights, shape.language, shape.value_bytes


def _check_family(path: Path, content: Mapping[str, Any]) -> None:
    if content.get("model_type") in FAMILIES:
        parts = (content, *(content.get(name) for name in ("text_config", "vision_config", "audio_config")))
        if any(isinstance(part, dict) and part.get("quantization_config") is not None for part in parts):
            raise ValueError(f"{path}: {QUANTISED}")
    elif why := refusal(content):
        raise ValueError(f"{path}: {why}. {_vllm_advice(content)}")


def _vllm_advice(content: Mapping[str, Any]) -> str:
    if importlib.util.find_spec("vllm") is None:
        return "With vLLM installed, engine: vllm serves many more (docs/guide/vllm.md)"
    if find_vllm(sys.executable).lists(content):
        return "The vLLM that is installed here knows it: write engine: vllm"
    names = ", ".join(map(str, content.get("architectures") or ()))
    return f"Nor does the vLLM that is installed here know {names or 'it'}"


def _dtype(config: DeploymentConfig, content: Mapping[str, Any]) -> str:
    """The dtype in which the model is computed."""
    if config.dtype != "auto":
        return config.dtype
    text = content.get("text_config") or {}
    saved = next((part[key] for part in (content, text) for key in ("dtype", "torch_dtype") if part.get(key)), "")
    return saved if saved in _BYTES else "float32"


def _check_kv(
    instance: InstancePlacement, settings: InstanceSettings, language: LanguageShape, number_bytes: int
) -> None:
    if settings.kv_cache_bytes is None:
        return
    block_size = tokens_per_block(settings.block_size, instance.devices[0])
    block_bytes = block_size * language.kv_values * number_bytes
    try:
        blocks_in(
            settings.kv_cache_bytes,
            block_bytes=block_bytes,
            block_size=block_size,
            state_blocks=-(-language.state_bytes(number_bytes) // block_bytes),
        )
    except ValueError as error:
        raise ValueError(f"{instance.name}: {error}") from None


def device_faults(config: DeploymentConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each kind of device, or device, that this machine or this Python does not have."""
    devices = list(dict.fromkeys(device for placed in config.placement() for device in placed.devices))
    for kind in dict.fromkeys(device.partition(":")[0] for device in devices):
        own = [device for device in devices if device.partition(":")[0] == kind]
        lack = "" if config.engine == "vllm" or isinstance(config.model, ShapeConfig) else torch_lacks(kind)
        if kind in ("cuda", "npu") and not lack and (reason := accelerators(kind).reason):
            lack = f"{reason}; on this machine write devices: [cpu]"
        if lack:
            yield f"{', '.join(own)}: {lack}"
        elif kind in ("cuda", "npu"):
            yield from filter(None, (_absent(device, environment) for device in own))
    for placed in config.placement():
        limited = placed.role.has_language_model and config.settings_for(str(placed.role)).tower_share is not None
        if limited and not placed.devices[0].startswith(("cuda", "emulated")):
            yield f"{placed.name}: {placed.devices[0]} limits no tower to a part of it; leave tower_share out"


def _absent(device: str, environment: Mapping[str, str]) -> str:
    """The reason why one device is not there though others of its kind are; "" where it is."""
    try:
        visibility([device], environment)
    except ValueError as error:
        return str(error)
    kind, _, index = device.partition(":")
    count = len(accelerators(kind).memory_bytes)
    if int(index) < count:
        return ""
    there = f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
    return f"{device}: this machine shows {there} alone; name one of these under devices"


def _memory_faults(
    config: DeploymentConfig, weights: Mapping[str, int], language: LanguageShape | None, number_bytes: int
) -> Iterator[str]:
    """A sentence for each device whose memory cannot hold what its instances keep, reckoned from below."""
    for device in dict.fromkeys(one for placed in config.placement() for one in placed.devices):
        room = _memory_of(device)
        if room is None:
            continue
        parts, kv = 0, 0
        for placed in config.placement():
            ranks = placed.devices.count(device)
            if not ranks:
                continue
            share = ranks / placed.tensor_parallel
            keeps_all = config.engine != "vllm" and config.resident(placed) == "all"
            parts += weights["tower"] * number_bytes * (placed.role.encodes or keeps_all)
            parts += int(
                weights["language"] * number_bytes * share * (placed.role.has_language_model or keeps_all)
            )
            if placed.role.has_language_model:
                settings = config.settings_for(str(placed.role))
                tokens = (settings.num_blocks or 0) * tokens_per_block(settings.block_size, device)
                token_bytes = 0 if language is None else language.kv_values * number_bytes
                kv += int((settings.kv_cache_bytes or tokens * token_bytes) * share)
        if parts + kv > room:
            kept = f"{in_binary_units(parts)} of weights at {number_bytes} bytes each, " if parts else ""
            where = "this machine" if device == "cpu" else device
            yield (
                f"{device}: its instances keep {in_binary_units(parts + kv)} at least ({kept}"
                f"{in_binary_units(kv)} of KV cache), and {where} has {in_binary_units(room)}; "
                f"write {_memory_advice(config, kv > parts)}"
            )


def _memory_advice(config: DeploymentConfig, mostly_kv: bool) -> str:
    if mostly_kv:
        return "a smaller kv_cache_bytes or num_blocks"
    return "dtype: auto, or a smaller model" if config.dtype == "float32" else "a smaller model, or more devices"


def _memory_of(device: str) -> int | None:
    kind, _, index = device.partition(":")
    if kind == "emulated":
        return int(emulated_sheet(emulated_kind(device)).memory_bytes)
    if kind != "cpu":
        return accelerators(kind).memory_bytes[int(index)]
    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)
