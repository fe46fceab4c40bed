"""The two versions of torch_npu's attention operator: they take the same arguments under different names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from device.base import DeviceUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """One version of the attention operator: its name and how it spells the arguments that differ."""

    operator: str
    num_heads: str
    scale: str
    query_lens: str
    context_lens: str

    @property
    def spellings(self) -> frozenset[str]:
        return frozenset((self.num_heads, self.scale, self.query_lens, self.context_lens))


V1 = FusedAttention(
    operator="npu_fused_infer_attention_score",
    num_heads="num_heads",
    scale="scale",
    query_lens="actual_seq_lengths",
    context_lens="actual_seq_lengths_kv",
)
V2 = FusedAttention(
    operator="npu_fused_infer_attention_score_v2",
    num_heads="num_query_heads",
    scale="softmax_scale",
    query_lens="actual_seq_qlen",
    context_lens="actual_seq_kvlen",
)


def choose_attention(operators: Any = None) -> FusedAttention:
    """The newest version that the installed torch_npu registers; v2 documents grouped heads for TND, v1 does not.

    Args:
        operators: ``torch.ops.npu`` unless given.

    Raises DeviceUnavailable where there is neither.
    """
    operators = torch.ops.npu if operators is None else operators
    for version in (V2, V1):
        operator = getattr(operators, version.operator, None)
        if operator is not None:
            arguments = {argument.name for argument in operator.default._schema.arguments}
            if version.spellings <= arguments:
                return version
    raise DeviceUnavailable(f"torch_npu registers neither npu::{V2.operator} nor npu::{V1.operator}: upgrade it")
