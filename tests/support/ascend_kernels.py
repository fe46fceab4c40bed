"""CPU kernels under the real ``npu::`` schemas, written from the operators' documentation, one sequence at a time.

With them AscendOps computes on CPU tensors. What they do not model they refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def register() -> None:
    """Once in a process; call after torch_npu is imported."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        _library.impl(name, kernel, "CPU")


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    exact = input.float()
    rstd = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return (exact * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert rotary_mode == "half" and rotate is None, "only the half mode is modelled"
    first, second = input.chunk(2, -1)
    return r1 * input + r2 * torch.cat((-second, first), -1)


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    assert cache_mode == "Norm" and compress_lens is compress_seq_offsets is seq_lens is None, "not modelled"
    block_size = key_cache.shape[1]
    assert len(set(slot_mapping.tolist())) == len(slot_mapping), "of a slot that is written twice nothing is known"
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: tuple[int, int],
    scale: float,
    query_lens: list[int] | None,
    context_lens: list[int] | None,
    layout: str,
    sparse_mode: int,
    mask: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    assert layout in ("TND", "BSND") and sparse_mode in (0, 3) and context_lens is not None, "not modelled"
    if layout == "BSND":
        batch, length = query.shape[:2]
        assert query_lens is None or query_lens == [length] * batch, "BSND padding is not modelled"
        ends = [length * (i + 1) for i in range(batch)]
    else:
        assert query_lens is not None
        ends = query_lens
    num_heads, num_kv_heads = heads[0], heads[1] or heads[0]
    packed = query.reshape(-1, num_heads, query.shape[-1])
    outputs: list[Tensor] = []
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if block_table is None:
            span = slice(context_lens[i - 1] if i else 0, context_lens[i])
            keys, values = key[span], value[span]
        else:
            pages = block_table[i].long()
            shape = (-1, num_kv_heads, query.shape[-1])
            assert key.shape[1] == block_size, "pages of another size"
            keys, values = (cache[pages].reshape(shape)[: context_lens[i]] for cache in (key, value))
        outputs.append(_attend(packed[start:end], keys, values, scale, mask if sparse_mode == 3 else None))
    return torch.cat(outputs).view(query.shape), query.new_zeros(1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[n, Hq, D] over [m, Hkv, D]; right-down causal reads row m - n + i of the mask for query i."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, 1).float() for states in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if mask is not None:
        n, m = scores.shape[1:]
        assert max(n, m) <= mask.shape[0], "the reference reads the mask without tiling it"
        hidden = mask[:m, :m][m - n :].bool()
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    own = {
        "heads": (given.pop("num_query_heads", 1), given.pop("num_key_value_heads", 0)),
        "scale": given.pop("softmax_scale", 1.0),
        "query_lens": given.pop("actual_seq_qlen", None),
        "context_lens": given.pop("actual_seq_kvlen", None),
        "layout": given.pop("input_layout", "BSH"),
        "sparse_mode": given.pop("sparse_mode", 0),
        "mask": given.pop("atten_mask", None),
        "block_table": given.pop("block_table", None),
        "block_size": given.pop("block_size", 0),
    }
    assert not given, f"arguments that are not modelled: {sorted(given)}"
    return _attention(query, key, value, **own)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score_v2": attention,
}
