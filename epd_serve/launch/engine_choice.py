"""The choice of ``engine: auto``: vLLM on GPUs and NPUs where it is installed and knows the model, else native."""

from __future__ import annotations

from typing import NamedTuple

from epd_serve.config import DEMO_MODEL, DeploymentConfig, change_config, model_path
from epd_serve.config.model_files import read_model_config
from epd_serve.launch.vllm.process import check_engines, engine_names


class EngineChoice(NamedTuple):
    """The deployment with its engine, and the reason for it; "" where its file names the engine."""

    config: DeploymentConfig
    reason: str


def choose_engine(config: DeploymentConfig) -> EngineChoice:
    """Decide what computes where ``engine`` is auto; another deployment is returned as it is."""
    if config.engine != "auto":
        return EngineChoice(config, "")
    if reason := _against_vllm(config):
        return EngineChoice(change_config(config, {"engine": "native"}), reason)
    chosen = change_config(config, {"engine": "vllm"})
    return EngineChoice(chosen, f"{engine_names(check_engines(chosen))} is installed here and knows the model")


def _against_vllm(config: DeploymentConfig) -> str:
    """The reason against vLLM; "" for none."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if others := kinds - {"cuda", "npu"}:
        return f"vLLM is chosen for GPUs and NPUs, and the devices are {', '.join(sorted(others))}"
    if config.model == DEMO_MODEL:
        return "the built-in model is the native engine's"
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
