"""The devices and the topology of a deployment on this machine whose file leaves them open."""

from __future__ import annotations

from typing import Any, NamedTuple

from device.present import accelerators, torch_lacks
from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, change_config, model_path
from epd_serve.config.model_files import read_model_config
from epd_serve.models.families import TEXT

_NAMES = {"cuda": "GPUs", "npu": "NPUs"}


class LayoutChoice(NamedTuple):
    """The deployment with its devices and its topology, and a sentence on what was chosen; "" for nothing."""

    config: DeploymentConfig
    reason: str


def choose_layout(config: DeploymentConfig) -> LayoutChoice:
    """Choose all GPUs or NPUs that are here, else the CPU, and a topology that fits the model and the devices.

    The built-in model is made for the CPU, and a model without weights names its devices. Raises ConfigError where
    the topology of the file needs more devices than there are.
    """
    if isinstance(config.model, ShapeConfig) or config.model == DEMO_MODEL:
        return LayoutChoice(config, "")
    changes: dict[str, Any] = {}
    reasons: list[str] = []
    devices = config.devices
    if "devices" not in config.model_fields_set:
        devices, why = _devices_here(config)
        changes["devices"] = list(devices)
        reasons.append(f"devices: {', '.join(devices)} ({why})")
    if "topology" not in config.model_fields_set:
        is_text = takes_text_alone(config)
        topology = _topology(is_text, 3 if set(devices) == {"cpu"} else len(devices))
        changes["topology"] = topology
        reasons.append(f"topology: {topology}" + (" (the model takes text alone)" if is_text else ""))
    if not changes:
        return LayoutChoice(config, "")
    return LayoutChoice(change_config(config, changes, source="devices: auto"), ", ".join(reasons))


def takes_text_alone(config: DeploymentConfig) -> bool:
    """Whether the checkpoint is of a family without a tower; False where it is not there to be read."""
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


def _topology(is_text: bool, num_devices: int) -> str:
    if is_text:
        return "P-D" if num_devices > 1 else "PD"
    return {1: "EPD", 2: "EP-D"}.get(num_devices, "E-P-D")
