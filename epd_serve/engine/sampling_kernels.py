"""Drawing tokens from what temperature, min-p, top-k and top-p, in vLLM's order, leave of a distribution.

Top-p keeps a token if all likelier ones together have less than that share; so it keeps equals together. On a
CPU no vocabulary is sorted: a draw from the whole distribution is thrown away where top-p does not keep it, and
with it all that is no likelier; the next draw is among the rest. That takes about 1 - ln(top_p) draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from epd_serve.engine.step_inputs import on_device
from epd_serve.request import Sequence
from epd_serve.types import SamplingParams

#: Tokens of which the largest is taken, or whose weights are summed up, to look no further elsewhere.
_BEST_RUN, _SUM_RUN = 64, 256
_MASKED = float("-inf")
#: The smallest that float32 divides by without losing digits.
_MIN_TEMPERATURE = 1.2e-38
#: From here on logits are divided by it before the largest is taken off.
_MIN_SCALED = 0.1
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Row:
    """One token to be sampled: for which sequence, as which of its choices."""

    sequence: Sequence
    index: int

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    def uniform(self, attempt: int = 0) -> float:
        """The token's random number in [0, 1), by Philox 4x64-10; another one for each attempt."""
        key_0, key_1 = self.sampling.seed & _WORD, self.sampling.first_choice + self.index
        first, second, third, fourth = len(self.sequence.output_ids) + 1, attempt, 0, 0
        for _ in range(10):
            left, right = 0xD2E7_470E_E14C_6C93 * first, 0xCA5A_8263_9512_1157 * third
            first, second = (right >> 64) ^ second ^ key_0, right & _WORD
            third, fourth = (left >> 64) ^ fourth ^ key_1, left & _WORD
            key_0, key_1 = (key_0 + 0x9E37_79B9_7F4A_7C15) & _WORD, (key_1 + 0xBB67_AE85_84CA_A73B) & _WORD
        return (first >> 11) * 2.0**-53


def draw(scores: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Draw a token for each row of ``scores`` [rows, width], float32: [rows] int64. Without a word to the host."""
    values = (scores - scores.amax(dim=-1, keepdim=True)).div_(_temperatures(scores, rows))
    params = [row.sampling for row in rows]
    if any(p.top_k or p.top_p < 1.0 or p.min_p for p in params):
        best, tokens = values.sort(dim=-1, descending=True)
    else:
        best, tokens = values, torch.arange(values.shape[1], device=values.device).expand_as(values)
    return _draw_best(best, tokens, rows)


def draw_from_largest(scores: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Draw as :func:`draw` does, from the largest entries alone: all rows have a top-k."""
    drawn = torch.empty(len(rows), dtype=torch.long, device=scores.device)
    by_top_k: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_top_k.setdefault(min(row.sampling.top_k, scores.shape[1]), []).append(i)
    for top_k, members in by_top_k.items():  # one size each: which of equals are the best depends on it
        some = [rows[i] for i in members]
        best, tokens = largest(scores if len(some) == len(rows) else scores[members], top_k)
        best = (best - best[:, :1]).div_(_temperatures(best, some))
        drawn[members] = _draw_best(best, tokens, some)
    return drawn


class RowDrawer:
    """Draws on a CPU, row by row: each passes through all its steps while a core's cache holds it."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._weights = torch.zeros(-(-width // _SUM_RUN) * _SUM_RUN)
        self._runs = self._weights.view(-1, _SUM_RUN)
        self._sums = torch.empty(len(self._runs))
        self._weights_np, self._sums_np = self._weights.numpy(), self._sums.numpy()

    def draw(self, values: Tensor, row: Row) -> int:
        """Draw a token by its logits [width], whatever top-k is."""
        sampling = row.sampling
        total = self._weigh(values, sampling.temperature)
        if not math.isfinite(total):  # all are forbidden, or the model's logits are no numbers
            return int(values.argmax())
        if sampling.min_p:
            total = self._drop(float(np.nextafter(np.float32(sampling.min_p), np.float32(0))))
        token = self._invert(row.uniform())
        attempt = 0
        while sampling.top_p < 1.0:
            above = self._drop(float(self._weights_np[token]))
            if above <= 0 or above < sampling.top_p * total:
                break
            attempt += 1
            token = self._invert(row.uniform(attempt))
        return token

    def _weigh(self, values: Tensor, temperature: float) -> float:
        """Set the weights, the largest to 1, and return their sum."""
        weights = self._weights[: self.width]
        weights.copy_(values)
        best = weights.amax()
        if temperature >= _MIN_SCALED:
            torch.add(best / -temperature, weights, alpha=1 / temperature, out=weights)
        else:  # from the best downwards, so that no temperature, however small, makes two infinities
            weights.sub_(best).div_(max(temperature, _MIN_TEMPERATURE))
        weights.exp_()
        return self._sum()

    def _drop(self, limit: float) -> float:
        """Leave only weights above a limit, and return their sum."""
        F.threshold(self._weights, limit, 0.0, inplace=True)
        return self._sum()

    def _sum(self) -> float:
        torch.sum(self._runs, dim=-1, out=self._sums)
        return float(self._sums_np.sum(dtype=np.float64))

    def _invert(self, uniform: float) -> int:
        """The token at which the weights' cumulative sum reaches this share of their total.

        The run of tokens is found first, then the token in it.
        """
        ends = self._sums_np.cumsum(dtype=np.float64)
        target = uniform * ends[-1]
        run = min(int(ends.searchsorted(target, side="right")), len(ends) - 1)
        if run:
            target -= ends[run - 1]
        within = self._weights_np[run * _SUM_RUN : (run + 1) * _SUM_RUN].cumsum(dtype=np.float64)
        # sums of another order may be smaller by a rounding: never beyond the last token of any weight
        target = min(target, within[-1] * (1 - 1e-12))
        return run * _SUM_RUN + int(within.searchsorted(target, side="right"))


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row, [rows, count], in descending order, and where they are.

    The largest lie in the runs of the largest maxima, which are far fewer.
    """
    width = values.shape[1]
    num_runs = width // _BEST_RUN
    if not count or values.device.type != "cpu" or width % _BEST_RUN or 4 * count > num_runs:
        best = values.topk(count)
        return best.values, best.indices
    folded = values.view(len(values), _BEST_RUN, num_runs)
    runs = folded.amax(dim=1).topk(count, sorted=False).indices.sort(dim=-1).values
    some = folded.gather(2, runs.unsqueeze(1).expand(-1, _BEST_RUN, -1)).flatten(1)
    best = some.topk(count)
    run = runs.gather(1, best.indices % count)
    return best.values, best.indices // count * num_runs + run


def _draw_best(best: Tensor, tokens: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Draw from tokens in descending order of their logarithmic weights, of which the parameters keep some."""
    params, width = [row.sampling for row in rows], best.shape[1]
    if any(p.top_k for p in params):
        limits = _column(best, [float(min(p.top_k or width, width)) for p in params])
        best = best.masked_fill(torch.arange(width, device=best.device) >= limits, _MASKED)
    weights = best.exp()
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < _column(best, [p.min_p for p in params]), 0.0)
    kept = weights
    if any(p.top_p < 1.0 for p in params):
        ends = weights.cumsum(dim=-1)
        # the mass of all that are likelier: equals begin where the first of them does
        starts = torch.where(F.pad(best, (1, 0), value=math.inf)[:, :-1] == best, -1.0, ends - weights)
        dropped = starts.cummax(dim=-1).values >= _column(best, [p.top_p for p in params]) * ends[:, -1:]
        kept = kept.masked_fill(dropped & (best < best[:, :1]), 0.0)
    cumulative = kept.double().cumsum(dim=-1)
    uniforms = on_device(best, [row.uniform() for row in rows], torch.float64).unsqueeze(1)
    # right=True skips tokens of no probability
    chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).clamp_(max=width - 1)
    return tokens.gather(1, chosen).squeeze(1)


def _temperatures(like: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    return _column(like, [max(row.sampling.temperature, _MIN_TEMPERATURE) for row in rows])


def _column(like: Tensor, values: list[float]) -> Tensor:
    return on_device(like, values, torch.float32).unsqueeze(1)
