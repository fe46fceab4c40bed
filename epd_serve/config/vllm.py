"""The deployment file's keys of ``engine: vllm``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from epd_serve.config.elastic import RoleName
from epd_serve.config.sections import FilePath, InstanceSettings, Section
from epd_serve.topology import InstancePlacement

#: Connector for encoder output. ``store``: epd-serve's own; ``file``: vLLM's, through a directory.
FeatureConnector = Literal["store", "file"]
#: vLLM's connectors that move KV from P to D.
KVConnector = Literal["mooncake", "nixl"]

#: Consecutive ports of an instance: HTTP, features, KV of up to 14 tensor-parallel ranks.
PORTS_PER_INSTANCE = 16
_MAX_TENSOR_PARALLEL = PORTS_PER_INSTANCE - 2

#: Keys of instances for the native engine only.
_NATIVE_KEYS = frozenset({"tower_share", "image_budget_pixels", "lease_s", "batching", "assist", "resident"})


class VllmConfig(Section):
    """vLLM and vllm-ascend, if ``engine`` is vllm. Their processes inherit the environment of 'epd-serve up'."""

    python: FilePath | dict[RoleName, FilePath] | None = Field(
        default=None,
        description="Python of vLLM's environment, relative to this file; null: the one that runs epd-serve. By "
        "role, as in {E: /opt/vllm-ascend/bin/python, PD: /opt/vllm/bin/python}, if several kinds of devices "
        "need different vLLMs; other roles use the one that runs epd-serve.",
    )
    kv: KVConnector | None = Field(
        default=None,
        description="vLLM's connector that moves KV from P to D. null: nixl on GPUs, mooncake on CPUs and NPUs.",
    )

    def python_of(self, role: str) -> str:
        """Return the interpreter of a role's instances."""
        named = self.python.items() if isinstance(self.python, dict) else [(role, self.python)]
        return str(next((python for name, python in named if name == role), None) or sys.executable)


def connectors(
    placement: Iterable[InstancePlacement], vllm: VllmConfig
) -> tuple[FeatureConnector | None, KVConnector | None]:
    """Return a deployment's connectors for encoder output and KV; None if the instances exchange none.

    vllm-ascend's vLLM (0.23) lacks the hooks of ``store``.
    """
    placement = tuple(placement)
    features: FeatureConnector = "file" if "npu" in _kinds(placement) else "store"
    kv: KVConnector = vllm.kv or ("nixl" if "cuda" in _kinds(_moving(placement)) else "mooncake")
    encodes = any(str(one.role) == "E" for one in placement)
    decodes = any(one.role.decodes and not one.role.prefills for one in placement)
    return features if encodes else None, kv if decodes else None


def pulls(placement: Iterable[InstancePlacement], kv: KVConnector | None) -> bool:
    """Return whether D requests KV only after P's answer, with the parameters in it."""
    return kv == "nixl" or (kv == "mooncake" and "npu" in _kinds(_moving(placement)))


def _moving(placement: Iterable[InstancePlacement]) -> list[InstancePlacement]:
    """Return the instances that send or receive KV."""
    return [one for one in placement if one.role.prefills != one.role.decodes]


def _kinds(placement: Iterable[InstancePlacement]) -> set[str]:
    return {device.partition(":")[0] for one in placement for device in one.devices}


def check_vllm(
    placement: Iterable[InstancePlacement],
    settings: Mapping[str, InstanceSettings],
    vllm: VllmConfig,
    set_keys: set[str],
) -> None:
    """Raise ValueError for options that ``engine: vllm`` does not support.

    Args:
        settings: settings of each role.
        set_keys: keys set by the deployment file.
    """
    if "feature_store" in set_keys:
        raise ValueError("feature_store has no effect with engine: vllm; leave it out")
    for role, one in settings.items():
        for key in _NATIVE_KEYS & one.model_fields_set:
            raise ValueError(f"{key} (of {role}) has no effect with engine: vllm; leave it out")
    placement = tuple(placement)
    moving = _moving(placement)
    for instance in placement:
        role = str(instance.role)
        if role == "ED":
            raise ValueError("ED: a vLLM instance that encodes for others does not decode; write E-P-D or EP-D")
        if instance.tensor_parallel > _MAX_TENSOR_PARALLEL:
            raise ValueError(f"@tp{instance.tensor_parallel}: at most {_MAX_TENSOR_PARALLEL} ranks have ports")
    kv, kinds = connectors(placement, vllm)[1], _kinds(moving)
    if kv is not None and len(kinds) > 1:
        raise ValueError(
            f"devices: KV moves between P and D of one kind, and these are on {' and '.join(sorted(kinds))}"
        )
    if kv is not None and kinds == {"npu"}:
        _check_npu(moving, kv)
    roles = {str(instance.role) for instance in placement}
    encoders = "E" in roles
    if encoders and roles & {"EP", "EPD"}:
        raise ValueError("E next to EP or EPD: these do not use features of E; write P or PD instead")
    for role in sorted(roles & {"E", "P", "PD"}) if encoders else ():
        if str(settings[role].engine_args.get("mm_processor_cache_gb")) in ("0", "0.0"):
            raise ValueError(
                f"engine_args of {role}: mm_processor_cache_gb: 0: vLLM 0.23 then numbers the pictures of each "
                "process instead of using the hashes by which E hands them to P; leave it out"
            )


def _check_npu(moving: Iterable[InstancePlacement], kv: KVConnector) -> None:
    """Raise ValueError for KV transfers that vllm-ascend 0.23.0 lacks (its ascend_config.py)."""
    if kv == "nixl":
        raise ValueError("vllm.kv: nixl does not support NPUs; write mooncake")
    prefill, decode = (
        max((one.tensor_parallel for one in moving if one.role.prefills is is_prefill), default=1)
        for is_prefill in (True, False)
    )
    if prefill % decode:
        raise ValueError(f"@tp{decode} of D, @tp{prefill} of P: on NPUs P's width must be a multiple of D's")
