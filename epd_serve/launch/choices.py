"""Choose for this machine the devices, topology and engine that a deployment file leaves open."""

from __future__ import annotations

from typing import Any

from device.present import accelerators, torch_lacks
from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, change_config, model_path
from epd_serve.config.model_files import read_model_config
from epd_serve.models.families import TEXT

_NAMES = {"cuda": "GPUs", "npu": "NPUs"}


def choose_layout(config: DeploymentConfig) -> tuple[DeploymentConfig, str]:
    """Choose this machine's GPUs or NPUs, otherwise the CPU, and a topology for the model and the devices.

    Returns the deployment and a sentence on the choice, "" for none. The built-in model runs on the CPU, and a
    model without weights names its devices. Raises ConfigError if the file's topology needs more devices.
    """
    if isinstance(config.model, ShapeConfig) or config.model == DEMO_MODEL:
        return config, ""
    changes: dict[str, Any] = {}
    reasons: list[str] = []
    devices = config.devices
    if "devices" not in config.model_fields_set:
        devices, why = _devices_here(config)
        changes["devices"] = list(devices)
        reasons.append(f"devices: {', '.join(devices)} ({why})")
    if "topology" not in config.model_fields_set:
        is_text, several = _takes_text_alone(config), 3 if set(devices) == {"cpu"} else len(devices)
        sizes = {1: "PD", 2: "P-D", 3: "P-D"} if is_text else {1: "EPD", 2: "EP-D", 3: "E-P-D"}
        topology = sizes[min(several, 3)]
        changes["topology"] = topology
        reasons.append(f"topology: {topology}" + (" (a text-only model)" if is_text else ""))
    if not changes:
        return config, ""
    return change_config(config, changes, source="devices: auto"), ", ".join(reasons)


def _takes_text_alone(config: DeploymentConfig) -> bool:
    """Return whether the checkpoint's family lacks a tower; False if it cannot be read."""
    try:
        return read_model_config(model_path(config.checkpoint)).get("model_type") in TEXT
    except ValueError:
        return False


def _devices_here(config: DeploymentConfig) -> tuple[tuple[str, ...], str]:
    """Return the devices of this machine, and the reason for the choice."""
    why = "no GPU or NPU found"
    for kind, name in _NAMES.items():
        if count := len(accelerators(kind).memory_bytes):
            lack = "" if config.engine == "vllm" else torch_lacks(kind)
            if not lack:
                return tuple(f"{kind}:{index}" for index in range(count)), f"all {name} of this machine"
            why = f"not the {name}: {lack}"
    return ("cpu",), why


def choose_engine(config: DeploymentConfig) -> tuple[DeploymentConfig, str]:
    """Choose vLLM on GPUs and NPUs if it is installed and supports the model, otherwise the native engine."""
    if config.engine != "auto":
        return config, ""
    if against := _against_vllm(config):
        return change_config(config, {"engine": "native"}), f"engine: native ({against})"
    from epd_serve.launch.vllm.process import check_engines, engine_names

    chosen = change_config(config, {"engine": "vllm"})
    names = engine_names(check_engines(chosen))
    return chosen, f"engine: vllm ({names} is installed here and knows the model)"


def _against_vllm(config: DeploymentConfig) -> str:
    """Return the reason against vLLM, or ""."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if others := kinds - {"cuda", "npu"}:
        return f"vLLM is only chosen for GPUs and NPUs, not for {', '.join(sorted(others))}"
    if config.model == DEMO_MODEL:
        return "vLLM does not run the built-in model"
    from epd_serve.launch.vllm.process import check_engines

    try:
        chosen = change_config(config, {"engine": "vllm"})
        content = read_model_config(model_path(config.checkpoint))
        engines = check_engines(chosen)
    except ValueError as error:  # no suitable vLLM, or an option for the native engine only
        return str(error)
    if all(one.lists(content) for one in engines.values()):
        return ""
    names = (
        ", ".join(map(str, content.get("architectures") or ())) or "a model without architectures in config.json"
    )
    return f"the installed vLLM does not support {names}"


def choose_all(config: DeploymentConfig) -> tuple[DeploymentConfig, list[str]]:
    """Return the deployment with its layout and engine chosen, and the reasons."""
    config, layout = choose_layout(config)
    config, engine = choose_engine(config)
    return config, [reason for reason in (layout, engine) if reason]
