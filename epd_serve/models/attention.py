"""The hook by which a transformers language model attends over our paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from device.base import AttentionOps, AttentionPlan

ATTENTION_NAME = "epd_paged"
_CONTEXT_ARGUMENT = "epd_context"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What each layer's attention needs to know of the step.

    Attributes:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        on_layer: called with the layer index once that layer's K and V are in the cache.
    """

    ops: AttentionOps
    plan: AttentionPlan
    kv: Tensor
    on_layer: Callable[[int], None] | None = None

    def as_arguments(self) -> dict[str, AttentionContext]:
        """Keyword arguments that transformers passes through to every layer's attention."""
        return {_CONTEXT_ARGUMENT: self}


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' convention: query [1, Hq, T, D], key and value [1, Hkv, T, D].

    No mask is registered under :data:`ATTENTION_NAME`, so transformers builds none.

    Returns:
        [1, T, Hq, D] and no weights.
    """
    context: AttentionContext = kwargs[_CONTEXT_ARGUMENT]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    kv_layer = context.kv[layer]
    context.ops.write_kv(keys, values, kv_layer, context.plan.meta.slot_mapping)
    if context.on_layer is not None:
        context.on_layer(layer)
    return context.ops.attend(queries, keys, values, kv_layer, context.plan, scale).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
