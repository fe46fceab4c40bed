"""Layers of a Llama-like language model over the paged cache, built from transformers' modules.

All operators but matrix products come from the device's :class:`~device.base.AttentionOps`. Projections of the
same input are fused: query, key and value; gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from device.base import AttentionOps, AttentionPlan
from device.ops.linear import Linear, fused, gated_linear, linear
from device.ops.plain import position_axes, rotary_tables

_INTERLEAVED_MROPE = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Inputs of a step's layers other than its tokens.

    Attributes:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        on_layer: called with the layer index once that layer's K and V are in the cache.
        both_ways: for each prefill, the runs of tokens with bidirectional attention; empty: none.
        states: [sequences, blocks of a recurrent state], decodes first; None without recurrent states.
        attend: attention of a layer, replacing the plan and the device's; called with the layer's index and the
            query, key, value and scale of ``AttentionOps.attend``.
    """

    plan: AttentionPlan
    kv: Tensor
    on_layer: Callable[[int], None] | None = None
    both_ways: Sequence[Sequence[tuple[int, int]]] = ()
    states: Tensor | None = None
    attend: Callable[[int, Tensor, Tensor, Tensor, float], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    mlp: Callable[[Tensor], Tensor]


class Decoder:
    """Runs the layers of a language model.

    ``capturable``: True without expert layers, whose routing reads values back from the device.
    """

    def __init__(self, model: Any, ops: AttentionOps) -> None:
        """Convert a transformers language model, emptying its layers one by one."""
        config = model.config
        self._ops = ops
        self._epsilon: float = config.rms_norm_eps
        rotary = model.rotary_emb
        self._frequencies = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._axes: Tensor | None = None
        if (sections := getattr(rotary, "mrope_section", None)) is not None:
            axes = position_axes(sections, interleaved=config.model_type in _INTERLEAVED_MROPE)
            self._axes = axes.to(self._frequencies.device)
        self.num_layers: int = config.num_hidden_layers
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_query_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.capturable = all(hasattr(layer.mlp, "gate_proj") for layer in model.layers)
        self._layers: list[_Layer] = []
        for index, layer in enumerate(model.layers):
            self._layers.append(self._convert(layer))
            model.layers[index] = nn.Identity()
        self._final_norm = model.norm.weight

    def state_blocks(self, block_size: int) -> int:
        """Return 0: these layers keep no recurrent state."""
        return 0

    def forward(
        self,
        ids: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        context: StepContext,
        feature_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the hidden states after the final norm.

        Args:
            ids: [T], unused. embeddings: [T, hidden]. positions: [axes, T].
            feature_rows: [F] int64, media tokens; None: all tokens.
            deepstack: features to add to these tokens after each of the first layers, [F, hidden] each.

        Returns:
            [T, hidden]
        """
        ops, layers = self._ops, self._layers
        cos, sin = rotary_tables(positions, self._frequencies, self._axes, self._scaling)
        residual = embeddings
        hidden = ops.rms_norm(embeddings, layers[0].input_norm, self._epsilon)
        for index, layer in enumerate(layers):
            attended = self._attend(layer, index, hidden, cos, sin, context)
            hidden, residual = ops.add_rms_norm(attended, residual, layer.post_norm, self._epsilon)
            hidden = layer.mlp(hidden)
            if index < len(deepstack):
                added = deepstack[index].to(hidden.dtype)
                hidden = hidden + added if feature_rows is None else hidden.index_add(0, feature_rows, added)
            norm = layers[index + 1].input_norm if index + 1 < len(layers) else self._final_norm
            hidden, residual = ops.add_rms_norm(hidden, residual, norm, self._epsilon)
        return hidden

    def _attend(
        self, layer: _Layer, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, context: StepContext
    ) -> Tensor:
        ops = self._ops
        states = layer.qkv(hidden).view(len(hidden), -1, self.head_dim)
        num_heads = [self.num_query_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(states, num_heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(query, layer.query_norm, self._epsilon)
            key = ops.rms_norm(key, layer.key_norm, self._epsilon)
        query, key = ops.rotary(query, key, cos, sin)
        kv_layer = context.kv[index]
        ops.write_kv(key, value, kv_layer, context.plan.meta.slot_mapping)
        if context.on_layer is not None:
            context.on_layer(index)
        scale = self.head_dim**-0.5
        if context.attend is not None:
            attended = context.attend(index, query, key, value, scale)
        else:
            attended = ops.attend(query, key, value, kv_layer, context.plan, scale)
        return layer.output(attended.flatten(1))

    def _convert(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        query_norm = getattr(attention, "q_norm", None)
        key_norm = getattr(attention, "k_norm", None)
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            output=_fuse(attention.o_proj),
            post_norm=layer.post_attention_layernorm.weight,
            mlp=self._convert_mlp(layer.mlp),
        )

    def _convert_mlp(self, mlp: Any) -> Callable[[Tensor], Tensor]:
        if not hasattr(mlp, "gate_proj"):  # experts
            return lambda hidden: mlp(hidden.unsqueeze(0)).squeeze(0)
        gate, up = mlp.gate_proj, mlp.up_proj
        biases = None if gate.bias is None else (gate.bias.detach(), up.bias.detach())
        weights = gate.weight.detach(), up.weight.detach()
        inner = gated_linear(*weights, self._ops.swiglu, biases, fused(mlp.act_fn))
        down = _fuse(mlp.down_proj)
        return lambda hidden: down(inner(hidden))


def _fuse(*projections: nn.Linear) -> Linear:
    """Return one product that concatenates several projections of the same input."""
    biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
    weights = [projection.weight.detach() for projection in projections]
    if len(projections) == 1:
        return linear(weights[0], *biases)
    return linear(torch.cat(weights), torch.cat(biases) if biases else None)
