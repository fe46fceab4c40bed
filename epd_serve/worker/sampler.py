"""From logits to tokens, the same on every instance and after every hand-off.

The random number of a token depends on (seed, choice index, position in the output) alone, so a sequence that
moves between instances goes on as if it had stayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionOps
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.request import Sequence
from epd_serve.types import SamplingParams
from epd_serve.worker.constraints import is_restricted, restrict

_MASKED = float("-inf")
#: The smallest that float32 divides by without losing digits.
_MIN_TEMPERATURE = 1.2e-38
#: Tokens whose weights are summed up to find where in the vocabulary a draw falls.
_RUN = 64
#: Tokens that are nearly always enough for top-k and top-p.
_NUM_BEST = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One token to be sampled: for which sequence, as which of its choices."""

    sequence: Sequence
    index: int

    @property
    def uniform(self) -> float:
        """The token's random number in [0, 1)."""
        seed = self.sequence.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        generator = np.random.Philox(key=[seed, self.index], counter=[len(self.sequence.output_ids), 0, 0, 0])
        return float((generator.random_raw() >> 11) * 2.0**-53)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


def sample(
    logits: Tensor, rows: AbstractSequence[Row], ops: AttentionOps, eos_token_ids: frozenset[int]
) -> list[SampledToken]:
    """Choose one token for each row of ``logits`` [len(rows), vocab]; waits for the device once.

    The largest is sought in the logits' own dtype; what is computed from them is float32.
    """
    scores = _constrain(logits, rows, eos_token_ids)
    drawn = [i for i, row in enumerate(rows) if not row.sequence.sampling.greedy]
    if len(drawn) == len(rows):
        tokens = _draw(scores.float(), rows)
    else:
        tokens = ops.argmax(scores)
        if drawn:
            some = _on(tokens, drawn)
            tokens = tokens.index_copy(0, some, _draw(scores[some].float(), [rows[i] for i in drawn]))
    described = {i: n for i, row in enumerate(rows) if (n := row.sequence.sampling.logprobs) is not None}
    if not described:
        return [SampledToken(token) for token in tokens.tolist()]
    return _with_logprobs(logits, tokens, described)


def _constrain(logits: Tensor, rows: AbstractSequence[Row], eos_token_ids: frozenset[int]) -> Tensor:
    """Penalties, min_tokens and what requests forbid; returns ``logits`` itself where no row asks for any."""
    scores = logits
    for i, row in enumerate(rows):
        sampling, output = row.sequence.sampling, row.sequence.output_ids
        held_back = len(output) < sampling.min_tokens
        if not sampling.penalised and not held_back:
            continue
        if scores is logits:
            scores = logits.to(torch.float32, copy=True)
        if sampling.penalised:
            _penalise(scores[i], row.sequence)
        if held_back:
            # a client may name ids that no token has; one of them must not fail the step for all
            ends = [token for token in (*eos_token_ids, *sampling.stop_token_ids) if token < scores.shape[-1]]
            scores[i].index_fill_(0, _on(scores, ends), _MASKED)
    if any(is_restricted(row.sequence) for row in rows):
        if scores is logits:
            scores = logits.to(torch.float32, copy=True)
        restrict(scores, [row.sequence for row in rows])
    return scores


def _penalise(scores: Tensor, sequence: Sequence) -> None:
    """Repetition over prompt and output, presence and frequency over the output, as in vLLM's API."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _on(scores, sorted({*sequence.prompt_ids, *sequence.output_ids}))
        values = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.output_ids:
        counts = Counter(sequence.output_ids)
        amounts = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
        scores[_on(scores, list(counts))] -= _on(scores, amounts, torch.float32)


def _draw(scores: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Sample from the distribution that temperature, top-k, top-p and min-p leave, by inversion: [rows] int64."""
    params = [row.sequence.sampling for row in rows]
    uniforms = _on(scores, [row.uniform for row in rows], torch.float64).unsqueeze(1)
    temperatures = _column(scores, [max(p.temperature, _MIN_TEMPERATURE) for p in params])
    # from the best downwards, so that no temperature, however small, makes two infinities
    values = (scores - scores.amax(dim=-1, keepdim=True)).div_(temperatures)
    ranked = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if len(ranked) == len(rows):
        return _draw_ranked(values, params, uniforms)
    if not ranked:
        return _draw_any(values, params, uniforms)
    some = _on(values, ranked)
    best = _draw_ranked(values[some], [params[i] for i in ranked], uniforms[some])
    return _draw_any(values, params, uniforms).index_copy(0, some, best)


def _draw_any(values: Tensor, params: AbstractSequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Among all tokens, in the vocabulary's order: first a run of them, then one of the run. Overwrites values."""
    weights = values.exp_()
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < _column(values, [p.min_p for p in params]), 0.0)
    missing = -weights.shape[1] % _RUN
    runs = (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _RUN)
    ends = runs.sum(dim=-1).double().cumsum(dim=-1)
    targets = uniforms * ends[:, -1:]
    run = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[1] - 1)
    targets -= F.pad(ends, (1, 0)).gather(1, run)
    within = runs.gather(1, run.unsqueeze(2).expand(-1, 1, _RUN)).squeeze(1).double().cumsum(dim=-1)
    # sums of another order may be smaller by a rounding: never beyond the last token of any weight
    targets = torch.minimum(targets, within[:, -1:] * (1 - 1e-12))
    return (run * _RUN + torch.searchsorted(within, targets, right=True)).squeeze(1)


def _draw_ranked(
    values: Tensor, params: AbstractSequence[SamplingParams], uniforms: Tensor, num_best: int | None = None
) -> Tensor:
    """Among the best tokens. On a CPU, which sorts slowly, only few are sorted where those are enough."""
    vocab = values.shape[-1]
    if num_best is None:
        num_best = min(_NUM_BEST, vocab) if values.device.type == "cpu" else vocab
    best, tokens = values.sort(dim=-1, descending=True) if num_best == vocab else values.topk(num_best)
    limits = [p.top_k or vocab for p in params]
    best = best.masked_fill(torch.arange(num_best, device=best.device) >= _column(best, limits), _MASKED)
    weights = best.exp()
    totals = torch.where(_column(best, limits) > num_best, values.exp().sum(-1, True), weights.sum(-1, True))
    probabilities = weights / totals
    cumulative = probabilities.cumsum(dim=-1)
    dropped = cumulative - probabilities >= _column(best, [p.top_p for p in params])
    dropped |= probabilities < _column(best, [p.min_p for p in params]) * probabilities[:, :1]
    dropped[:, 0] = False
    kept = probabilities.masked_fill(dropped, 0.0).double().cumsum(dim=-1)
    # right=True skips tokens of no probability
    chosen = torch.searchsorted(kept, uniforms * kept[:, -1:], right=True).clamp_(max=num_best - 1)
    drawn = tokens.gather(1, chosen).squeeze(1)
    if num_best < vocab:  # each row looks for itself: none depends on its batch
        is_cut = dropped[:, -1].tolist()
        short = [i for i, limit in enumerate(limits) if limit > num_best and not is_cut[i]]
        if short:
            more = min(16 * num_best, vocab)
            drawn[short] = _draw_ranked(values[short], [params[i] for i in short], uniforms[short], more)
    return drawn


def _with_logprobs(logits: Tensor, tokens: Tensor, counts: dict[int, int]) -> list[SampledToken]:
    """Log-probabilities before temperature and penalties, as OpenAI and vLLM report them.

    Args:
        counts: how many of the best each row that has them wants, by row.
    """
    rows = _on(logits, list(counts))
    scores = (logits if len(rows) == len(logits) else logits[rows]).float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    chosen = scores.gather(1, tokens[rows].unsqueeze(1))
    best = scores.topk(min(max(counts.values()), scores.shape[1]))
    # one copy for all: float32 as it is, in the bits of int32
    floats = (torch.cat([chosen, best.values], dim=1) - total).view(torch.int32)
    packed = torch.cat([tokens.int(), best.indices.int().flatten(), floats.flatten()]).cpu()
    count_ids, count_top = len(tokens), best.indices.numel()
    sampled = [SampledToken(token) for token in packed[:count_ids].tolist()]
    top_ids = packed[count_ids : count_ids + count_top].view(len(rows), -1).tolist()
    values = packed[count_ids + count_top :].view(torch.float32).view(len(rows), -1).tolist()
    details = zip(counts.items(), top_ids, values, strict=True)
    for (i, count), top, (logprob, *top_logprobs) in details:
        token_id = sampled[i].token_id
        pairs = list(zip(top, top_logprobs, strict=True))[:count]
        sampled[i] = SampledToken(token_id, TokenLogprob(token_id=token_id, logprob=logprob, top=pairs))
    return sampled


def _on(like: Tensor, values: list[int] | list[float], dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers on a tensor's device; does not wait for what the device has to do before."""
    tensor = torch.tensor(values, dtype=dtype)
    if like.device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(like.device, non_blocking=True)


def _column(like: Tensor, values: list[int] | list[float]) -> Tensor:
    return _on(like, values, torch.float32).unsqueeze(1)
