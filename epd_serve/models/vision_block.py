"""The layers of Qwen's vision towers with the products, norms and rotation of the language model's layers.

transformers rotates in float32, and activates, gates and adds in passes of their own: on a CPU all that takes as
long as the products. Positions, windows, patches and projectors stay transformers'.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from device.base import AttentionOps
from device.ops.linear import Product, activated_linear, gated_linear, linear
from epd_serve.models.activations import fused
from epd_serve.models.attention import TowerAttention

_BLOCKS = ("Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock", "Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock")


class VisionBlock(nn.Module):
    """Stands for a layer that transformers made; the products keep their own copy of its weights."""

    def __init__(self, block: Any, ops: AttentionOps, attention: TowerAttention) -> None:
        super().__init__()
        self._ops = ops
        self._borders = attention.borders
        self._num_heads: int = block.attn.num_heads
        self._scale: float = block.attn.scaling
        self._norms = [_norm(block.norm1, ops), _norm(block.norm2, ops)]
        self._qkv, self._output = _product(block.attn.qkv), _product(block.attn.proj)
        if hasattr(block.mlp, "gate_proj"):
            gate, up = block.mlp.gate_proj, block.mlp.up_proj
            biases = None if gate.bias is None else (gate.bias.detach(), up.bias.detach())
            weights = gate.weight.detach(), up.weight.detach()
            self._inner = gated_linear(*weights, ops.swiglu, biases, fused(block.mlp.act_fn))
            self._down = _product(block.mlp.down_proj)
        else:
            names = ("linear_fc1", "linear_fc2") if hasattr(block.mlp, "linear_fc1") else ("fc1", "fc2")
            inner, down = (getattr(block.mlp, name) for name in names)
            activation = fused(getattr(block.mlp, "act_fn", None) or block.mlp.act)
            self._inner = activated_linear(inner.weight.detach(), inner.bias.detach(), activation)
            self._down = _product(down)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """Hidden states [T, hidden], borders of segments [S + 1], cos and sin [T, head_dim] → [T, hidden]."""
        first_norm, second_norm = self._norms
        states = self._qkv(first_norm(hidden_states)).view(len(hidden_states), 3 * self._num_heads, -1)
        query, key, value = states.chunk(3, dim=1)
        query, key = self._ops.rotary(query, key, *position_embeddings)
        attended = self._ops.encode(query, key, value, self._borders(cu_seqlens), self._scale)
        hidden_states = self._output(attended.flatten(1), add=hidden_states)
        return self._down(self._inner(second_norm(hidden_states)), add=hidden_states)


def replace_blocks(model: nn.Module, ops: AttentionOps, attention: TowerAttention) -> None:
    """Let the layers of Qwen's towers run as :class:`VisionBlock`; others stay as they are."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for index, block in enumerate(module):
                if type(block).__name__ in _BLOCKS:
                    module[index] = VisionBlock(block, ops, attention)


def _product(module: Any) -> Product:
    return linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any, ops: AttentionOps) -> Any:
    if isinstance(module, nn.LayerNorm):
        return module
    weight, epsilon = module.weight.detach(), module.variance_epsilon
    return lambda hidden: ops.rms_norm(hidden, weight, epsilon)
