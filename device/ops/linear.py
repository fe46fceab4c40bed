"""Matrix products with fixed weights, in the layout that the device multiplies fastest.

On CPUs that multiply the weights' dtype in hardware, oneDNN keeps a copy of its own, in blocks that need no
rearranging on each call: the caller should let go of the weights that it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device.ops.shared_weights import pack_shared

Linear = Callable[[Tensor], Tensor]
#: Rows of the product that the blocks of a packed weight are laid out for: good from 1 to some hundreds.
_PACKED_FOR_ROWS = 64


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """``states @ weight.T + bias`` of states [..., in], by a weight [out, in] and a bias [out]."""
    if not _packs(weight):
        return partial(F.linear, weight=weight, bias=bias)
    packed, multiply = _pack(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda states: multiply(states, packed, bias, "none", [], "")


def gated_linear(gate: Tensor, up: Tensor, swiglu: Callable[[Tensor], Tensor]) -> Linear:
    """``silu(states @ gate.T) * (states @ up.T)``, both weights [out, in].

    Args:
        swiglu: does the same to both products side by side, [..., 2 * out]; used where they are one product.
    """
    if not _packs(gate):
        both = linear(torch.cat((gate, up)))
        return lambda states: swiglu(both(states))
    packed_gate, packed_up = _pack(gate), _pack(up)
    multiply = torch.ops.mkldnn._linear_pointwise
    activate, gated = multiply.default, multiply.binary
    # silu and the product are taken while a block of results is still in registers
    return lambda states: gated(
        states, activate(states, packed_gate, None, "swish", [], ""), packed_up, None, "mul"
    )


class PackedLinear(nn.Module):
    """Stands for an ``nn.Linear`` of a model that somebody else wrote."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        self._multiply = linear(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def forward(self, states: Tensor) -> Tensor:
        return self._multiply(states)


class PatchLinear(nn.Module):
    """Stands for an ``nn.Conv3d`` that gets patches of exactly its kernel's size: then it is a plain product."""

    def __init__(self, module: nn.Conv3d) -> None:
        super().__init__()
        bias = None if module.bias is None else module.bias.detach()
        self._multiply = linear(module.weight.detach().flatten(1), bias)
        self._kernel = torch.Size(module.kernel_size)
        self.weight = module.weight.new_empty(0)  # models ask it for the dtype

    def forward(self, patches: Tensor) -> Tensor:
        """[N, channels, *kernel] → [N, out, 1, 1, 1]"""
        assert patches.shape[2:] == self._kernel, "patches are as large as the kernel"
        return self._multiply(patches.flatten(1))[:, :, None, None, None]


def pack_modules(model: nn.Module) -> None:
    """Let the products of a vision tower run as :func:`linear`, its patch embedding among them.

    torch's convolution is slow at patches: a quarter of an encoding on a CPU.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and _packs(child.weight):
                setattr(module, name, PackedLinear(child))
            elif type(child) is nn.Conv3d and child.kernel_size == child.stride and child.groups == 1:
                setattr(module, name, PatchLinear(child))


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _pack(weight: Tensor) -> Tensor:
    return pack_shared(weight, _reorder)


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)
    return packed
