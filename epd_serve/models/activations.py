"""Activations of transformers' layers, by the names under which products have them fused."""

from __future__ import annotations

from torch import nn

from device.ops.linear import Activation

_FUSED: dict[str, Activation] = {
    "SiLUActivation": "swish",
    "SiLU": "swish",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def fused(activation: nn.Module) -> Activation | nn.Module:
    """The name of an activation that products can apply; else the activation itself."""
    return _FUSED.get(type(activation).__name__, activation)
