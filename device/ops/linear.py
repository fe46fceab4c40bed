"""Matrix products with a fixed weight, in the layout that the device multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
#: Rows of the product that the blocks of a packed weight are laid out for: good from 1 to some hundreds.
_PACKED_FOR_ROWS = 64


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """``states @ weight.T + bias`` as a function of states [..., in].

    Args:
        weight: [out, in]. bias: [out]. The caller should let go of the weight: oneDNN keeps its own copy on CPUs
            that multiply its dtype in hardware, in blocks that need no rearranging on each call.
    """
    if not _packs(weight):
        return partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda states: multiply(states, packed, bias, "none", [], "")


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
