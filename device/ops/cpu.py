"""The CPU's operators: plain torch, with what measures faster on a CPU."""

from __future__ import annotations

from torch import Tensor

from device.ops.plain import PlainOps


class CpuOps(PlainOps):
    """Fills the AttentionOps protocol for float32, bfloat16 and float16 on a CPU."""

    name = "plain torch (CPU)"

    def argmax(self, logits: Tensor) -> Tensor:
        # torch's bfloat16 argmax is four times slower on a CPU than its max, which gives the index as well.
        return logits.max(dim=-1).indices
