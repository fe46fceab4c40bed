"""The deployment file's keys of ``engine: vllm``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from pydantic import Field

from epd_serve.backends.vllm_command import Connectors, KVConnector, kinds_of, moving_kv
from epd_serve.config.sections import FilePath, InstanceSettings, RoleName, Section
from epd_serve.topology import InstancePlacement

#: Consecutive ports of an instance: HTTP, features, KV of up to 14 tensor-parallel ranks.
PORTS_PER_INSTANCE = 16
_MAX_TENSOR_PARALLEL = PORTS_PER_INSTANCE - 2

#: Keys of instances for the native engine only.
_NATIVE_KEYS = frozenset({"tower_share", "image_budget_pixels", "batching", "assist", "resident"})


class VllmConfig(Section):
    """vLLM and vllm-ascend, if ``engine`` is vllm. Their processes inherit the environment of 'epd-serve up'."""

    python: FilePath | dict[RoleName, FilePath] | None = Field(
        default=None,
        description="Python of vLLM's environment, also by role, as in {E: /opt/vllm-ascend/bin/python, "
        "PD: /opt/vllm/bin/python}; null, and roles left out: the one that runs epd-serve.",
    )
    kv: KVConnector | None = Field(
        default=None,
        description="vLLM's connector that moves KV from P to D. null: nixl on GPUs, mooncake on CPUs and NPUs.",
    )

    def python_of(self, role: str) -> str:
        """Return the interpreter of a role's instances."""
        named = self.python.items() if isinstance(self.python, dict) else [(role, self.python)]
        return str(next((python for name, python in named if name == role), None) or sys.executable)

    def check(self, placement: Sequence[InstancePlacement], settings: Mapping[str, InstanceSettings]) -> None:
        """Raise ValueError for options that vLLM's instances do not support; ``settings``: by role."""
        for role, one in settings.items():
            for key in _NATIVE_KEYS & one.model_fields_set:
                raise ValueError(f"{key} (of {role}) has no effect with engine: vllm; leave it out")
        roles = {str(instance.role) for instance in placement}
        if "ED" in roles:
            raise ValueError("ED: a vLLM instance that encodes for others does not decode; write E-P-D or EP-D")
        if "E" in roles and roles & {"EP", "EPD"}:
            raise ValueError("E next to EP or EPD: these do not use features of E; write P or PD instead")
        for role in sorted(roles & {"E", "P", "PD"}) if "E" in roles else ():
            if settings[role].engine_args.get("mm_processor_cache_gb") in (0, "0", "0.0"):
                raise ValueError(
                    f"engine_args of {role}: mm_processor_cache_gb: 0: vLLM 0.23 then numbers the pictures of "
                    "each process instead of using the hashes by which E hands them to P; leave it out"
                )
        if (width := max(instance.tensor_parallel for instance in placement)) > _MAX_TENSOR_PARALLEL:
            raise ValueError(f"@tp{width}: at most {_MAX_TENSOR_PARALLEL} ranks have ports")
        used, kinds = Connectors.between(placement, self.kv), kinds_of(moving_kv(placement))
        if used.kv is None:
            return
        if len(kinds) > 1:
            raise ValueError(
                f"devices: KV moves between P and D of one kind, and these are on {' and '.join(sorted(kinds))}"
            )
        if kinds == {"npu"}:  # vllm-ascend 0.23.0 (its ascend_config.py)
            prefill, decode = used.widths
            if used.kv == "nixl":
                raise ValueError("vllm.kv: nixl does not support NPUs; write mooncake")
            if prefill % decode:
                raise ValueError(
                    f"@tp{decode} of D, @tp{prefill} of P: on NPUs P's width must be a multiple of D's"
                )
