"""Choose for this machine the devices, topology and engine that a deployment file leaves open."""

from __future__ import annotations

from typing import Any

from device.present import accelerators, torch_lacks
from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, change_config, model_path
from epd_serve.config.model_files import read_model_config
from epd_serve.models.families import TEXT

_NAMES = {"cuda": "GPUs", "npu": "NPUs"}


#: The deployment, and a sentence on what was chosen; "" for nothing.
Choice = tuple[DeploymentConfig, str]


def choose_layout(config: DeploymentConfig) -> Choice:
    """Choose all GPUs or NPUs that are here, else the CPU, and a topology that fits the model and the devices.

    The built-in model is made for the CPU, and a model without weights names its devices. Raises ConfigError where
    the topology of the file needs more devices than there are.
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
        reasons.append(f"topology: {topology}" + (" (the model takes text alone)" if is_text else ""))
    if not changes:
        return config, ""
    return change_config(config, changes, source="devices: auto"), ", ".join(reasons)


def _takes_text_alone(config: DeploymentConfig) -> bool:
    """Return whether the checkpoint is of a family without a tower; False where it cannot be read."""
    try:
        return read_model_config(model_path(config.checkpoint)).get("model_type") in TEXT
    except ValueError:
        return False


def _devices_here(config: DeploymentConfig) -> tuple[tuple[str, ...], str]:
    """Return the devices of this machine, and the reason for them."""
    why = "there is no GPU and no NPU here"
    for kind, name in _NAMES.items():
        if count := len(accelerators(kind).memory_bytes):
            lack = "" if config.engine == "vllm" else torch_lacks(kind)
            if not lack:
                return tuple(f"{kind}:{index}" for index in range(count)), f"all {name} of this machine"
            why = f"not the {name}: {lack}"
    return ("cpu",), why


def choose_engine(config: DeploymentConfig) -> Choice:
    """Choose vLLM on GPUs and NPUs where it is installed and knows the model, else the native engine."""
    if config.engine != "auto":
        return config, ""
    if against := _against_vllm(config):
        return change_config(config, {"engine": "native"}), f"engine: native ({against})"
    from epd_serve.launch.vllm.process import check_engines, engine_names

    chosen = change_config(config, {"engine": "vllm"})
    names = engine_names(check_engines(chosen))
    return chosen, f"engine: vllm ({names} is installed here and knows the model)"


def _against_vllm(config: DeploymentConfig) -> str:
    """The reason against vLLM; "" for none."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if others := kinds - {"cuda", "npu"}:
        return f"vLLM is chosen for GPUs and NPUs, and the devices are {', '.join(sorted(others))}"
    if config.model == DEMO_MODEL:
        return "the built-in model is the native engine's"
    from epd_serve.launch.vllm.process import check_engines

    try:
        chosen = change_config(config, {"engine": "vllm"})
        content = read_model_config(model_path(config.checkpoint))
        engines = check_engines(chosen)
    except ValueError as error:  # no vLLM, one that does not fit, or an option of the native engine alone
        return str(error)
    if all(one.lists(content) for one in engines.values()):
        return ""
    names = ", ".join(map(str, content.get("architectures") or ())) or "the model, whose config.json names none"
    return f"the vLLM that is installed here does not know {names}"


def choose_all(config: DeploymentConfig) -> tuple[DeploymentConfig, list[str]]:
    """Return the deployment with its layout and its engine chosen, and the reasons."""
    config, layout = choose_layout(config)
    config, engine = choose_engine(config)
    return config, [reason for reason in (layout, engine) if reason]
