"""Comparisons of a backend's operators with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from operator_batch import Batch, Layout, lay_out
from operator_oracle import ReferenceOps
from torch import Tensor

from device.base import AttentionOps


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Compares operators with the oracle.

    Each method makes random inputs of the given shapes, rounds them to the dtype, runs the backend on its device
    and the oracle in float32 on the CPU, and returns the largest error, as a fraction of 1 + the expected
    magnitude. It raises AssertionError, with the error, where that is more than ``tolerance``.

    Attributes:
        layout: of the inputs; None: as a model has them.
    """

    ops: AttentionOps
    dtype: torch.dtype
    device: torch.device
    tolerance: float
    seed: int = 0
    layout: Layout | None = None

    def step(self, batch: Batch) -> float:
        """``prepare``, ``write_kv`` and ``attend`` of one step: the outputs, and the cache bit by bit."""
        expected, expected_cache = batch.rounded(self.dtype).run(ReferenceOps())
        output, cache = batch.run(self.ops, self.dtype, self.device)
        assert output.is_contiguous(), f"attend returned strides {output.stride()} for {tuple(output.shape)}"
        # Padding rows may write the same slot, in any order: nobody reads them, but NaN would spread.
        assert bool(torch.isfinite(cache[:, 0]).all()), "NaN in block 0"
        assert bool(torch.isfinite(output).all()), "NaN or infinity in the output: something not owned was read"
        written, expected_cache = cache[:, 1:].cpu().float().nan_to_num(7.0), expected_cache[:, 1:].nan_to_num(7.0)
        assert torch.equal(written, expected_cache), "write_kv stored otherwise"
        keep = torch.ones(len(expected), dtype=torch.bool)
        keep[batch.num_decodes : batch.num_decodes + batch.padding] = False
        return self._compare(output.cpu()[keep], expected[keep])

    def encode(self, lengths: Sequence[int], heads: int, head_dim: int) -> float:
        """Attention of a tower over segments of these lengths, by borders on either side; 0: an empty one."""
        borders = list(accumulate(lengths, initial=0))
        states = list(self._random((3, borders[-1], heads, head_dim)))
        scale = head_dim**-0.5
        exact = [state.float() for state in states]
        expected = ReferenceOps().encode(exact[0], exact[1], exact[2], borders, scale)
        query, key, value = self._laid_out(states, "fused")
        output = self.ops.encode(query, key, value, borders, scale)
        assert output.is_contiguous(), f"encode returned strides {output.stride()} for {tuple(output.shape)}"
        difference = self._compare(output, expected)
        if (encode := self.ops.encode_captured(self.dtype)) is not None and borders[-1]:
            there = torch.tensor([*borders, borders[-1]], dtype=torch.int32).to(self.device)
            query, key, value = (F.pad(state, (0, 0, 0, 0, 0, 3), value=1e3) for state in (query, key, value))
            output = encode(query, key, value, there, max(lengths), scale)
            difference = max(difference, self._compare(output[: borders[-1]], expected))
        return difference

    def norms(self, shape: Sequence[int], epsilon: float = 1e-6) -> float:
        """``rms_norm`` and ``add_rms_norm`` of [T, D], or of heads [T, H, D] with one weight [D] for all."""
        hidden, residual = self._random((2, *shape))
        weight, oracle = self._random((shape[-1],), 1), ReferenceOps()
        there = weight.to(self.device)
        given, before = self._laid_out([hidden, residual], "contiguous")
        normed = self.ops.rms_norm(given, there, epsilon)
        error = self._compare(normed, oracle.rms_norm(hidden.float(), weight.float(), epsilon))
        normed, total = self.ops.add_rms_norm(given, before, there, epsilon)
        exact = (hidden + residual).float()
        compare(total, exact, self.dtype, 0.0)
        return max(error, self._compare(normed, oracle.rms_norm(exact, weight.float(), epsilon)))

    def rotary(self, tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> float:
        """Rotation of queries and keys with float32 tables, whatever the dtype of the states."""
        states = [self._random((tokens, heads, head_dim), heads) for heads in (query_heads, kv_heads)]
        angles = self._random((tokens, head_dim // 2), 2, torch.float32).repeat(1, 2) * 10
        cos, sin = angles.cos(), angles.sin()
        expected = ReferenceOps().rotary(states[0].float(), states[1].float(), cos, sin)
        query, key = self._laid_out(states, "fused")
        rotated = self.ops.rotary(query, key, cos.to(self.device), sin.to(self.device))
        return max(self._compare(ours, theirs) for ours, theirs in zip(rotated, expected, strict=True))

    def swiglu(self, tokens: int, width: int) -> float:
        """``silu(gate) * up`` of a fused projection [tokens, 2 * width]."""
        gate_up = self._random((tokens, 2 * width)) * 3
        [given] = self._laid_out([gate_up], "contiguous")
        return self._compare(self.ops.swiglu(given), ReferenceOps().swiglu(gate_up.float()))

    def argmax(self, rows: int, vocabulary: int) -> float:
        """The first of the largest entries, among ties and masked entries; the error is 0."""
        generator = torch.Generator().manual_seed(self.seed)
        # Few distinct numbers, so that the largest comes often; a masked entry is minus infinity.
        logits = torch.randint(-3, 3, (rows, vocabulary), generator=generator).to(self.dtype)
        logits[:, torch.rand(vocabulary, generator=generator) < 0.3] = float("-inf")
        if rows:
            logits[0] = float("-inf")
        is_largest = logits == logits.amax(dim=-1, keepdim=True)
        places = torch.arange(vocabulary).expand(rows, -1).masked_fill(~is_largest, vocabulary)
        indices = self.ops.argmax(logits.to(self.device))
        assert indices.dtype == torch.int64, f"argmax returned {indices.dtype}, not int64"
        expected = places.amin(dim=-1)
        assert torch.equal(indices.cpu(), expected), f"argmax gave {indices.tolist()}, not {expected.tolist()}"
        return 0.0

    def _laid_out(self, states: Sequence[Tensor], usual: Layout) -> list[Tensor]:
        return lay_out([state.to(self.device) for state in states], self.layout or usual)

    def _compare(self, actual: Tensor, expected: Tensor) -> float:
        return compare(actual, expected, self.dtype, self.tolerance)

    def _random(self, shape: Sequence[int], number: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + number)
        return torch.randn(*shape, generator=generator).to(dtype or self.dtype)


def compare(actual: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float) -> float:
    """The largest error of ``actual``, which must be of ``dtype``, against float32 numbers."""
    assert actual.dtype == dtype, f"the result is {actual.dtype}, not {dtype}"
    assert actual.shape == expected.shape, f"the result is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    errors = (actual.detach().cpu().float() - expected).abs() / (1 + expected.abs())
    wrong = ~(errors <= tolerance)  # NaN is wrong, too
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ from the oracle's, by up to "
        f"{float(errors.nan_to_num(float('inf')).max()):.2g} where {tolerance:.2g} is right"
    )
    return float(errors.max())
