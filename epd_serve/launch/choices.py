"""Choose for this machine the devices, topology and engine that a deployment file leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device.present import accelerators, torch_lacks
from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, change_config, model_path
from epd_serve.config.model_files import read_model_config
from epd_serve.models.families import TEXT


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
        try:
            is_text = read_model_config(model_path(config.checkpoint)).get("model_type") in TEXT
        except ValueError:  # it is elsewhere
            is_text = False
        several = 3 if set(devices) == {"cpu"} else len(devices)
        sizes = {1: "PD", 2: "P-D", 3: "P-D"} if is_text else {1: "EPD", 2: "EP-D", 3: "E-P-D"}
        changes["topology"] = topology = sizes[min(several, 3)]
        reasons.append(f"topology: {topology}" + (" (a text-only model)" if is_text else ""))
    if not changes:
        return config, ""
    return change_config(config, changes, source="devices: auto"), ", ".join(reasons)


def _devices_here(config: DeploymentConfig) -> tuple[tuple[str, ...], str]:
    """Return the devices of this machine, and the reason for the choice."""
    why = "no GPU or NPU found"
    for kind, name in (("cuda", "GPUs"), ("npu", "NPUs")):
        if count := len(accelerators(kind).memory_bytes):
            lack = "" if config.engine == "vllm" else torch_lacks(kind)
            if not lack:
                return tuple(f"{kind}:{index}" for index in range(count)), f"all {name} of this machine"
            why = f"not the {name}: {lack}"
    return ("cpu",), why


def choose_engine(config: DeploymentConfig) -> tuple[DeploymentConfig, str]:
    """Choose vLLM on GPUs and NPUs if it is installed and supports the model, otherwise the native engine.

    Returns the deployment and a sentence on the choice, "" for none.
    """
    if config.engine != "auto":
        return config, ""
    chosen, reason = _with_vllm(config)
    engine = "native" if chosen is None else "vllm"
    return chosen or change_config(config, {"engine": "native"}), f"engine: {engine} ({reason})"


def _with_vllm(config: DeploymentConfig) -> tuple[DeploymentConfig | None, str]:
    """Return the deployment with vLLM, or the reason against it."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if others := kinds - {"cuda", "npu"}:
        return None, f"vLLM is only chosen for GPUs and NPUs, not for {', '.join(sorted(others))}"
    if config.model == DEMO_MODEL:
        return None, "vLLM does not run the built-in model"
    from epd_serve.launch.vllm.process import check_engines, engine_names

    try:
        chosen = change_config(config, {"engine": "vllm"})
        content = read_model_config(model_path(config.checkpoint))
        engines = check_engines(chosen)
    except ValueError as error:  # no suitable vLLM, or an option for the native engine only
        return None, str(error)
    if all(one.lists(content) for one in engines.values()):
        return chosen, f"{engine_names(engines)} is installed here and knows the model"
    names = ", ".join(map(str, content.get("architectures") or ["a model without architectures in config.json"]))
    return None, f"the installed vLLM does not support {names}"


def resolve(config: DeploymentConfig) -> tuple[DeploymentConfig, list[str]]:
    """Choose layout and engine, and make paths absolute, as the gateway reads the deployment elsewhere.

    Returns the deployment and a sentence on each choice.
    """
    config, layout = choose_layout(config)
    config, engine = choose_engine(config)
    changes: dict[str, Any] = {}
    for key in ("trace", "chat_template"):
        if (path := getattr(config, key)) is not None:
            changes[key] = str(path.absolute())
    if config.gateway.access_log not in (None, "-"):
        changes["gateway"] = {"access_log": str(Path(config.gateway.access_log or "").absolute())}
    return change_config(config, changes) if changes else config, [one for one in (layout, engine) if one]
