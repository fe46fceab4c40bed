"""Matrix products with fixed weights, in the device's fastest layout.

On CPUs oneDNN keeps its own packed copy of weights in float32 (x86), and in a two-byte dtype that the hardware
multiplies: callers should drop their reference to the weights. On other CPUs a custom kernel multiplies few rows.
Many rows are multiplied in float32, by a part of the weight at a time, because torch's bfloat16 and float16
products take several times as long.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device.ops.cpu_kernels import amx_kernels, cpu_kernels

Linear = Callable[[Tensor], Tensor]
Activation = Literal["none", "swish", "gelu_tanh"]
#: Rows for which packed weights are laid out: good from 1 to some hundreds.
_PACKED_FOR_ROWS = 64
#: Rows from which float32 pays for the conversion of the weight, done 16 MiB at a time.
_WIDENED_ROWS = 16
_WIDENED_NUMBERS = 1 << 22
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda states: states,
    "swish": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_FUSED: dict[Activation, tuple[str, str]] = {
    "none": ("none", ""),
    "swish": ("swish", ""),
    "gelu_tanh": ("gelu", "tanh"),
}


class Product:
    """``states @ weight.T + bias`` for states [..., in], a weight [out, in] and a bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._width = len(weight)
        self._is_packed = _packs(weight)
        self._weight = weight
        if self._is_packed:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self._weight = pack(weight.detach().contiguous(), _PACKED_FOR_ROWS)
        kernels = amx_kernels() if self._is_packed and weight.dtype == torch.bfloat16 else None
        self._address = None if kernels is None else kernels.packed_address(self._weight, weight)
        self._kernels = kernels
        self._rows = cpu_kernels() if _takes_rows(weight) else None

    def __call__(
        self,
        states: Tensor,
        activation: Activation = "none",
        *,
        add: Tensor | None = None,
        multiply: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(product)`` plus ``add`` or times ``multiply`` [..., out], fused if possible."""
        assert add is None or multiply is None
        other = multiply if add is None else add
        kernels, address = self._kernels, self._address
        if kernels is not None and address is not None and kernels.takes_rows(states):
            return kernels.linear(
                states, address, self._width, self._bias, activation, other, multiply is not None
            )
        if not self._is_packed:
            product = _ACTIVATIONS[activation](self._multiply(states))
            if other is None:
                return product
            return product + other if multiply is None else product * other
        operator = torch.ops.mkldnn._linear_pointwise
        if other is not None and activation == "none":
            combine = "add" if multiply is None else "mul"
            result: Tensor = operator.binary(states, other, self._weight, self._bias, combine)
            return result
        name, algorithm = _FUSED[activation]
        result = operator.default(states, self._weight, self._bias, name, [], algorithm)
        if other is not None:
            return result + other if multiply is None else result * other
        return result

    def _multiply(self, states: Tensor) -> Tensor:
        weight, bias = self._weight, self._bias
        if self._rows is not None and self._rows.takes_rows(states, weight):
            return self._rows.linear(states, weight, bias)
        if not _widens(weight) or states.numel() < _WIDENED_ROWS * weight.shape[1]:
            return F.linear(states, weight, bias)
        wide, rows = states.float(), max(_WIDENED_NUMBERS // weight.shape[1], 1)
        product = states.new_empty(*states.shape[:-1], self._width)
        for start in range(0, self._width, rows):
            part = None if bias is None else bias[start : start + rows].float()
            product[..., start : start + rows] = F.linear(wide, weight[start : start + rows].float(), part)
        return product


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a product with the weight; the caller should drop its reference to the weight."""
    if _packs(weight) or _widens(weight) or (_takes_rows(weight) and cpu_kernels() is not None):
        return Product(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def gated_linear(
    gate: Tensor,
    up: Tensor,
    swiglu: Callable[[Tensor], Tensor],
    biases: tuple[Tensor, Tensor] | None = None,
    activation: Activation | Callable[[Tensor], Tensor] = "swish",
) -> Linear:
    """Return ``activation(states @ gate.T) * (states @ up.T)`` as a callable; both weights are [out, in].

    Args:
        biases: added to both products, [out] each.
        activation: applied elementwise.
        swiglu: fused operator on both products side by side, [..., 2 * out]; used if they are one product and the
            activation is "swish".
    """
    if not _packs(gate):
        both = linear(torch.cat((gate, up)), None if biases is None else torch.cat(biases))
        if activation == "swish":
            return lambda states: swiglu(both(states))
        activate = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

        def gated(states: Tensor) -> Tensor:
            inner, outer = both(states).chunk(2, dim=-1)
            return activate(inner) * outer

        return gated
    gate_bias, up_bias = biases or (None, None)
    gate_product, up_product = activated_linear(gate, gate_bias, activation), Product(up, up_bias)
    return lambda states: up_product(states, multiply=gate_product(states))


def activated_linear(
    weight: Tensor, bias: Tensor | None, activation: Activation | Callable[[Tensor], Tensor]
) -> Linear:
    """Return ``activation(states @ weight.T + bias)`` as a callable, fused if the activation has a name."""
    product = Product(weight, bias)
    if isinstance(activation, str):
        return partial(product, activation=activation)
    return lambda states: activation(product(states))


class PackedLinear(nn.Module):
    """Replacement for an ``nn.Linear`` of a third-party model."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        self._multiply = linear(module.weight.detach(), None if module.bias is None else module.bias.detach())
        self.weight = module.weight.new_empty(0)  # models read its dtype

    def forward(self, states: Tensor) -> Tensor:
        return self._multiply(states)


class PatchLinear(nn.Module):
    """Replacement for an ``nn.Conv3d`` whose patches have exactly its kernel's size: a plain product."""

    def __init__(self, module: nn.Conv3d) -> None:
        super().__init__()
        bias = None if module.bias is None else module.bias.detach()
        self._multiply = linear(module.weight.detach().flatten(1), bias)
        self._kernel = torch.Size(module.kernel_size)
        self.weight = module.weight.new_empty(0)  # models read its dtype

    def forward(self, patches: Tensor) -> Tensor:
        """[N, channels, *kernel] → [N, out, 1, 1, 1]"""
        assert patches.shape[2:] == self._kernel, "patches are as large as the kernel"
        return self._multiply(patches.flatten(1))[:, :, None, None, None]


def pack_modules(model: nn.Module) -> None:
    """Replace the products of a vision tower, including its patch embedding, with :func:`linear`.

    torch's convolution is slow on patches: a quarter of an encode on a CPU.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and (_packs(child.weight) or _widens(child.weight)):
                setattr(module, name, PackedLinear(child))
            elif type(child) is nn.Conv3d and child.kernel_size == child.stride and child.groups == 1:
                setattr(module, name, PatchLinear(child))


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        return torch._C._has_mkldnn and platform.machine() == "x86_64"
    return multiplies_halves(weight.dtype)


def _takes_rows(weight: Tensor) -> bool:
    """Return whether the custom kernel can multiply few rows by this weight."""
    is_plain = weight.device.type == "cpu" and weight.is_contiguous() and not _packs(weight)
    return is_plain and weight.dtype in (torch.float32, torch.bfloat16)


def _widens(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype.itemsize == 2 and not multiplies_halves(weight.dtype)


def multiplies_halves(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies a two-byte dtype in hardware; False for other dtypes."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


#: Classes of transformers and torch.
_BY_CLASS: dict[str, Activation] = {
    "SiLUActivation": "swish",
    "SiLU": "swish",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def fused(activation: nn.Module) -> Activation | nn.Module:
    """Return the name of an activation that products can fuse; otherwise the activation itself."""
    return _BY_CLASS.get(type(activation).__name__, activation)
