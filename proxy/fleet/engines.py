"""The stage calls that an instance's engine takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from epd_serve.backends.base import StageCalls
from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.backends.vllm import VllmInstances
from epd_serve.backends.vllm_server import VllmTarget
from epd_serve.config import DeploymentConfig
from epd_serve.config.vllm import connectors

#: Flags of vLLM with which the rest of an answer is not to be told from its tokens: text is parsed as a whole,
#: or an event has several tokens, whose text may end before the last.
_WHOLE_ONLY = frozenset({"reasoning_parser", "speculative_config", "stream_interval"})


def vllm_targets(config: DeploymentConfig) -> dict[str, VllmTarget]:
    """Return what the gateway has to know of each vLLM instance of a deployment, by name."""
    placement = config.placement()
    features, kv = connectors(placement, config.vllm)
    return {
        one.name: VllmTarget(
            role=one.role,
            device=",".join(one.devices),
            dtype=config.dtype,
            model_path=str(Path(config.model).expanduser()),
            ranks=one.tensor_parallel,
            features=features,
            kv=kv,
            pulls=kv == "nixl" or (kv == "mooncake" and one.devices[0].startswith("npu")),
            rewrites=config.vllm.media == "rewritten",
            continues=_WHOLE_ONLY.isdisjoint(config.settings_for(str(one.role)).engine_args),
            recomputes=config.vllm.kv_load_failure == "recompute",
        )
        for one in placement
    }


def connector(
    connections: NativeConnections, vllm: Mapping[str, VllmTarget] | None
) -> Callable[[str, str], StageCalls]:
    """Makes the calls to an instance of a name at a URL."""
    return partial(NativeInstance, connections) if vllm is None else VllmInstances(connections, vllm).connect
