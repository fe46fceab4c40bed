"""NVIDIA operators with Triton: paged decode, cache write and fused layer operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from device.base import AttentionPlan, AttnMeta
from device.ops import triton_decode, triton_layers, triton_sample
from device.ops.cuda import CudaOps, CudaPlan


class TritonOps(CudaOps):
    """AttentionOps with Triton kernels.

    Args:
        cores: multiprocessors of the GPU, over which the decode kernel spreads its work.
    """

    # few tokens and many; contexts in one split and in several
    compiled_by = (
        (33, 2),
        (1, 2 * triton_decode.MIN_SPLIT_TOKENS + 1),
        (triton_layers.MANY_TOKENS, 0),
        # products pick kernels by the number of rows, and CUDA loads each kernel at its first use
        *((tokens, 0) for tokens in range(128, triton_layers.MANY_TOKENS, 128)),
    )
    draw = staticmethod(triton_sample.draw)

    def __init__(self, cores: int, varlen: Callable[..., Tensor] | None, *, has_fast_cudnn: bool = False) -> None:
        super().__init__(varlen, has_fast_cudnn=has_fast_cudnn)
        self._cores = cores
        self.name = f"Triton decode, {'plain torch' if varlen is None else 'varlen flash'} prefill"

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        triton_layers.write_kv(key, value, kv_layer, slot_mapping)

    def _prepare_decodes(self, meta: AttnMeta, dtype: torch.dtype) -> AttentionPlan | None:
        return None

    def _decode_step(self, query: Tensor, kv_layer: Tensor, plan: CudaPlan, scale: float) -> Tensor:
        meta = plan.meta
        return triton_decode.paged_decode(
            query, kv_layer, meta.decode_block_table, meta.decode_context_lens, scale, cores=self._cores
        )

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return triton_layers.rms_norm(hidden, None, weight, epsilon)[0]

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        normed, total = triton_layers.rms_norm(hidden, residual, weight, epsilon)
        assert total is not None
        return normed, total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return triton_layers.rotate(query, cos, sin), triton_layers.rotate(key, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return triton_layers.swiglu(gate_up)
