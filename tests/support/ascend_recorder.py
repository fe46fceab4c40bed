"""Checks every ``npu::`` call against what the operators' documentation asks and their Meta kernels let pass.

Source: the docstrings that torch_npu 2.13.0 carries (torch_npu/_op_plugin_docs.py), the parts on A2 and A3. The
argument names are written out here again, so that a mistake in the backend's table is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASK_TYPES = (torch.bool, torch.int8, torch.uint8)
_HALF = (torch.bfloat16, torch.float16)
_MAX_INT32 = 2**31 - 1


class Violation(AssertionError):
    """A call that the documentation forbids."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


def _attention(a: dict[str, Any]) -> SimpleNamespace:
    """The arguments with their defaults."""
    num_heads = a.get("num_query_heads", 1)
    return SimpleNamespace(
        query=a["query"],
        key=a["key"],
        value=a["value"],
        num_heads=num_heads,
        num_kv_heads=a.get("num_key_value_heads", 0) or num_heads,
        layout=a.get("input_layout", "BSH"),
        query_lens=a.get("actual_seq_qlen"),
        context_lens=a.get("actual_seq_kvlen"),
        sparse_mode=a.get("sparse_mode", 0),
        mask=a.get("atten_mask"),
        block_table=a.get("block_table"),
        block_size=a.get("block_size", 0),
    )


def check_attention(a: SimpleNamespace) -> None:
    query, key, value = a.query, a.key, a.value
    _need(query.dtype in _HALF, f"query of {query.dtype}: bfloat16 or float16")
    _need(key.dtype == value.dtype == query.dtype, "query, key and value of one type")
    _need(key.shape == value.shape, "key and value of one shape")
    _need(all(t.is_contiguous() for t in (query, key, value)), "no strided query, key or value")
    _need(a.num_heads % a.num_kv_heads == 0, f"{a.num_heads} query heads over {a.num_kv_heads} KV heads")
    _need(a.num_heads // a.num_kv_heads <= 64, "at most 64 query heads for one KV head")
    _need(query.shape[-2] == a.num_heads and a.layout in ("TND", "BSND"), "query [..., heads, dim], TND or BSND")
    _need(query.dim() == (3 if a.layout == "TND" else 4), f"rank of a {a.layout} query")
    _check_mask(a)
    query_lens = _query_lens(a)
    if a.block_table is None:
        _check_unpaged(a)
    else:
        _check_paged(a, a.block_table, query_lens)


def _check_mask(a: SimpleNamespace) -> None:
    _need(a.sparse_mode in (0, 3), "sparse mode 0 or 3 (TND knows no other without rope inputs)")
    _need((a.mask is not None) == (a.sparse_mode == 3), "a mask with sparse mode 3 and none with 0")
    if a.mask is not None:
        _need(tuple(a.mask.shape[-2:]) == (2048, 2048), "the compressed mask is 2048 x 2048")
        _need(a.mask.dtype in _MASK_TYPES, f"a mask of {a.mask.dtype}: bool, int8 or uint8")


def _query_lens(a: SimpleNamespace) -> list[int]:
    """Lengths of the queries, one a sequence."""
    if a.layout == "BSND":
        batch, padded = a.query.shape[:2]
        _need(padded == 1 or a.query.shape[2] * a.query.shape[3] < 65535, "heads * dim below 65535 with BSND")
        lens = a.query_lens if a.query_lens is not None else [padded] * batch
        _need(len(lens) == batch and all(0 < n <= padded for n in lens), "BSND: one length a sequence, within S")
        return lens
    _need(a.query.dtype == torch.bfloat16, f"TND in {a.query.dtype}: bfloat16 only")
    _need(a.query_lens is not None and a.context_lens is not None, "TND needs both length lists")
    ends = a.query_lens or []
    _need(ends == sorted(ends) and ends[-1] == a.query.shape[0], "TND: cumulative query lengths that end at T")
    _need(a.query.shape[0] <= 2**20 and len(ends) <= 4096, "TND: too many tokens or sequences")
    _need(a.query.shape[-1] in (128, 192), f"TND: heads of 128 or 192 dimensions, not {a.query.shape[-1]}")
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _check_unpaged(a: SimpleNamespace) -> None:
    ends = a.context_lens or []
    _need(a.layout == "TND", "unpaged calls are TND here")
    _need(len(ends) == len(a.query_lens or []), "as many context lengths as query lengths")
    _need(ends == sorted(ends) and ends[-1] == a.key.shape[0], "cumulative context lengths that end at the keys")
    _need(tuple(a.key.shape[1:]) == (a.num_kv_heads, a.query.shape[-1]), "keys [T, KV heads, dim]")


def _check_paged(a: SimpleNamespace, table: Tensor, query_lens: list[int]) -> None:
    context_lens = a.context_lens or []
    multiple = 128 if max(query_lens) > 1 else 16
    _need(0 < a.block_size <= 512 and a.block_size % multiple == 0, f"block_size: multiple of {multiple} to 512")
    _need(table.dtype == torch.int32 and table.dim() == 2, "block_table [batch, blocks] of int32")
    _need(table.is_contiguous(), "a contiguous block_table")
    _need(table.shape[0] == len(query_lens) == len(context_lens), "one table row and length for each sequence")
    _need(min(context_lens) > 0, "a context of at least one token")
    _need(max(context_lens) <= table.shape[1] * a.block_size, "block_table too narrow for the longest context")
    _need(all(q <= c for q, c in zip(query_lens, context_lens, strict=True)), "no query longer than its context")
    width = a.num_kv_heads * a.query.shape[-1]
    _need(tuple(a.key.shape[1:]) == (a.block_size, width), "cache [blocks, block_size, KV heads * dim]")
    _need(width <= 65535 and a.key.numel() <= _MAX_INT32, "KV heads * dim to 65535, cache elements to 2^31 - 1")


def check_scatter(a: dict[str, Any]) -> None:
    key, value, slots = a["key"], a["value"], a["slot_mapping"]
    _need(a.get("cache_mode") == "Norm", "cache_mode Norm for pages [blocks, block_size, heads, dim]")
    _need(slots.dtype in (torch.int32, torch.int64), f"slot_mapping of {slots.dtype}: int32 or int64")
    _need(slots.dim() == 1 and len(slots) == key.shape[0] == value.shape[0], "one slot for each token")
    for states, cache in ((key, a["key_cache"]), (value, a["value_cache"])):
        _need(states.dim() == 3 and cache.dim() == 4, "tokens [T, heads, dim] into a cache of rank 4")
        _need(states.shape[1:] == cache.shape[2:] and states.dtype == cache.dtype, "tokens that fit the cache")
        _need(cache.is_contiguous(), "a contiguous cache")


def check_rms_norm(a: dict[str, Any]) -> None:
    hidden, gamma = a.get("input", a.get("x1")), a["gamma"]
    _need(2 <= hidden.dim() <= 8, "2 to 8 dimensions")
    _need(gamma.shape == hidden.shape[-gamma.dim() :], f"gamma {list(gamma.shape)} of {list(hidden.shape)}")
    _need(gamma.dtype == hidden.dtype, "gamma of the input's type")


def check_add_rms_norm(a: dict[str, Any]) -> None:
    _need(a["x1"].shape == a["x2"].shape and a["x1"].dtype == a["x2"].dtype, "two inputs of one shape and type")
    check_rms_norm(a)


def check_rotary(a: dict[str, Any]) -> None:
    states, tables = a["input"], (a["r1"], a["r2"])
    _need(states.dim() == 4 and states.is_contiguous(), "four dimensions, contiguous")
    batch, tokens, heads, dim = states.shape
    _need(batch < 1000 and heads < 1000 and dim < 896 and dim % 2 == 0, "batch and heads < 1000, even dim < 896")
    for table in tables:
        _need(tuple(table.shape) == (1, tokens, 1, dim) and table.dtype == states.dtype, "tables 1S1D of its type")


def check_swiglu(a: dict[str, Any]) -> None:
    _need(a["input"].shape[a.get("dim", -1)] % 2 == 0, "an even width to halve")


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "npu_fused_infer_attention_score_v2": lambda a: check_attention(_attention(a)),
    "npu_scatter_pa_kv_cache": check_scatter,
    "npu_rms_norm": check_rms_norm,
    "npu_add_rms_norm": check_add_rms_norm,
    "npu_rotary_mul": check_rotary,
    "npu_swiglu": check_swiglu,
}


class NpuRecorder(TorchDispatchMode):
    """Names the operators in ``calls`` and raises Violation; every ``npu::`` operator must have a check."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace == "npu":
            arguments = {p.name: value for p, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            _need(name in CHECKS, f"npu::{name} has no check")
            CHECKS[name](arguments)
            self.calls.append(name)
        return func(*args, **kwargs)
