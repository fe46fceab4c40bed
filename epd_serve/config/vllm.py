"""The deployment file's keys of ``engine: vllm``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from epd_serve.config.applied import Anew, Section
from epd_serve.config.elastic import RoleName
from epd_serve.config.sections import InstanceSettings
from epd_serve.topology import InstancePlacement

#: How encoder output reaches P. ``store``: epd-serve's own connector; ``file``: vLLM's, through a directory.
FeatureConnector = Literal["store", "file"]
#: How KV reaches D. ``grouped``: epd-serve's own connector, in groups of layers; the others are vLLM's.
KVConnector = Literal["grouped", "mooncake", "nixl"]

#: Ports that an instance takes from its own on: HTTP, features, KV of up to 14 tensor-parallel ranks.
PORTS_PER_INSTANCE = 16
_MAX_TENSOR_PARALLEL = PORTS_PER_INSTANCE - 2

#: Keys that only the native engine has, with what to do instead.
_NATIVE_KEYS = {
    "stream_priority": "vLLM has no such thing",
    "tower_share": "vLLM has no such thing",
    "async_scheduling": "write engine_args: {async_scheduling: true}",
    "image_budget_pixels": "vLLM's encoder budget follows max_num_batched_tokens",
    "queue_timeout_s": "gateway.queue_timeout_s bounds the wait at the gateway",
    "lease_s": "vLLM's connectors have times of their own",
    "drain_s": "write engine_args: {shutdown_timeout: 30}",
    "parity": "vLLM's P takes what E gives it",
    "batching": "vLLM schedules by max_num_batched_tokens",
    "share_weights": "each vLLM process loads its own",
    "keep_weights": "each vLLM process holds the weights of its roles",
    "preload": "vLLM processes are not forked",
}
_NATIVE_SECTIONS = {
    "feature_store": "choose vllm.features",
}
#: Seen in its code (tests/vllm_ascend/test_layerwise.py).
_LAYERWISE = (
    "vllm-ascend's MooncakeLayerwiseConnector (0.23.0) tells D that KV has come of which a write has failed, and "
    "D keeps the blocks of a request for good where P fails; write mooncake"
)


class VllmConfig(Section):
    """vLLM and vllm-ascend, where ``engine`` is vllm."""

    python: Anew[Path | dict[RoleName, Path] | None] = Field(
        default=None,
        description="Python of the environment that vLLM is installed in, relative to this file; null: the one "
        "that runs epd-serve. By role, as in {E: /opt/vllm-ascend/bin/python, PD: /opt/vllm/bin/python}, where "
        "devices of several kinds need a vLLM each; roles that are not named have the one that runs epd-serve.",
    )
    features: Anew[FeatureConnector | None] = Field(
        default=None,
        description="How encoder output reaches P. store: epd-serve's connector, by content hash, in the "
        "background. file: vLLM's ECExampleConnector, through feature_dir. null: store, and file on NPUs.",
    )
    kv: Anew[KVConnector | None] = Field(
        default=None,
        description="How KV reaches D. grouped: epd-serve's connector, groups of layers during the forward pass, "
        "for KV caches in host memory. mooncake, nixl: vLLM's. null: grouped on CPUs, nixl on GPUs, mooncake on "
        "NPUs.",
    )
    feature_dir: Anew[Path | None] = Field(
        default=None,
        description="A directory that all instances see, for features: file; relative to this file. Nothing is "
        "ever deleted in it.",
    )
    kv_load_failure: Anew[Literal["recompute", "fail"]] = Field(
        default="recompute",
        description="What D does where KV does not come: compute the prompt itself, or give an error.",
    )
    media: Anew[Literal["raw", "rewritten"]] = Field(
        default="raw",
        description="What P and D get of a picture. raw: its pixels, as E does. rewritten: no more than its place "
        "in the prompt, which E tells; they then neither receive nor prepare pixels, and are called once E has "
        "answered. With kv: mooncake P gets the pixels. Needs E and features: store.",
    )
    environment: Anew[dict[str, str]] = Field(
        default_factory=dict, description="Variables for all vLLM processes, as in VLLM_LOGGING_LEVEL: DEBUG."
    )

    @field_validator("kv", mode="before")
    @classmethod
    def _not_layerwise(cls, kv: Any) -> Any:
        if kv == "layerwise":
            raise ValueError(_LAYERWISE)
        return kv

    def python_of(self, role: str) -> str:
        """The interpreter of the instances of a role."""
        named = self.python.items() if isinstance(self.python, dict) else [(role, self.python)]
        return str(next((python for name, python in named if name == role), None) or sys.executable)


def connectors(
    placement: Iterable[InstancePlacement], vllm: VllmConfig
) -> tuple[FeatureConnector | None, KVConnector | None]:
    """Return a deployment's connectors: as the file says, else by the devices; None: nothing is handed on."""
    placement = tuple(placement)
    kinds = _kinds(_moving(placement))
    features = vllm.features or ("file" if "npu" in _kinds(placement) else "store")
    kv = vllm.kv or ("mooncake" if "npu" in kinds else "nixl" if "cuda" in kinds else "grouped")
    encodes = any(str(one.role) == "E" for one in placement)
    decodes = any(one.role.decodes and not one.role.prefills for one in placement)
    return features if encodes else None, kv if decodes else None


def _moving(placement: Iterable[InstancePlacement]) -> list[InstancePlacement]:
    """The instances that hand KV over or take it over."""
    return [one for one in placement if one.role.prefills != one.role.decodes]


def _kinds(placement: Iterable[InstancePlacement]) -> set[str]:
    return {device.partition(":")[0] for one in placement for device in one.devices}


def check_vllm(
    placement: Iterable[InstancePlacement],
    settings: Mapping[str, InstanceSettings],
    vllm: VllmConfig,
    set_keys: set[str],
) -> None:
    """Raise ValueError for what a deployment with ``engine: vllm`` asks for and cannot have.

    Args:
        settings: of each role.
        set_keys: of the deployment file, those that it sets.
    """
    for key, instead in _NATIVE_SECTIONS.items():
        if key in set_keys:
            raise ValueError(f"{key} has no effect with engine: vllm; {instead}")
    for role, one in settings.items():
        for key, instead in _NATIVE_KEYS.items():
            if key in one.model_fields_set:
                raise ValueError(f"{key} (of {role}) has no effect with engine: vllm; {instead}")
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
    if kv == "grouped":
        if kinds != {"cpu"}:
            raise ValueError("vllm.kv: grouped moves KV caches in host memory; write mooncake or nixl")
        if len({one.tensor_parallel for one in moving}) > 1:
            raise ValueError("vllm.kv: grouped needs the same @tp for P and D; write mooncake or nixl")
    roles = {str(instance.role) for instance in placement}
    encoders = "E" in roles
    if encoders and roles & {"EP", "EPD"}:
        raise ValueError(
            "E beside EP or EPD: these keep their features to themselves; write P or PD in their place"
        )
    if vllm.media == "rewritten" and connectors(placement, vllm)[0] != "store":
        raise ValueError(
            "vllm.media: rewritten gives P and D what E tells of pictures: it needs E, and vllm.features: store"
        )
    for role in sorted(roles & {"E", "P", "PD"}) if encoders else ():
        if str(settings[role].engine_args.get("mm_processor_cache_gb")) in ("0", "0.0"):
            raise ValueError(
                f"engine_args of {role}: mm_processor_cache_gb: 0: vLLM 0.23 then numbers the pictures of each "
                "process, in place of the hashes by which E hands them to P; leave it out"
            )
    if encoders and vllm.features == "file" and vllm.feature_dir is None:
        raise ValueError("vllm.features: file needs vllm.feature_dir, a directory that E and P both see")


def _check_npu(moving: Iterable[InstancePlacement], kv: KVConnector) -> None:
    """Raise ValueError for KV that vllm-ascend 0.23.0 does not move (ascend_config.py there)."""
    if kv == "nixl":
        raise ValueError("vllm.kv: nixl knows no NPU; write mooncake")
    prefill, decode = (
        max((one.tensor_parallel for one in moving if one.role.prefills is is_prefill), default=1)
        for is_prefill in (True, False)
    )
    if prefill % decode:
        raise ValueError(f"@tp{decode} of D beside @tp{prefill} of P: on NPUs P's width must be a multiple of D's")
