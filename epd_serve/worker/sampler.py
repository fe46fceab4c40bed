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
from torch import Tensor

from device.base import AttentionOps
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.request import Sequence

_MASKED = float("-inf")
#: The smallest that float32 divides by without losing digits.
_MIN_TEMPERATURE = 1.2e-38


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
        return float(np.random.Generator(generator).random())


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


def sample(
    logits: Tensor, rows: AbstractSequence[Row], ops: AttentionOps, eos_token_ids: frozenset[int]
) -> list[SampledToken]:
    """Choose one token for each row of ``logits`` [len(rows), vocab]; what is computed from them is float32."""
    scores = _constrain(logits, rows, eos_token_ids)
    tokens = ops.argmax(scores).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.sequence.sampling.greedy]
    if drawn:
        for i, token in zip(drawn, _draw(scores[drawn].float(), [rows[i] for i in drawn]), strict=True):
            tokens[i] = token
    return [
        SampledToken(token, _logprob(logits[i], token, row.sequence.sampling.logprobs))
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def _constrain(logits: Tensor, rows: AbstractSequence[Row], eos_token_ids: frozenset[int]) -> Tensor:
    """Penalties and min_tokens; returns ``logits`` itself where no row asks for any."""
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
            scores[i, ends] = _MASKED
    return scores


def _penalise(scores: Tensor, sequence: Sequence) -> None:
    """Repetition over prompt and output, presence and frequency over the output, as in vLLM's API."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sequence.prompt_ids, *sequence.output_ids}), device=scores.device)
        values = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.output_ids:
        counts = Counter(sequence.output_ids)
        amounts = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
        scores[list(counts)] -= torch.tensor(amounts, device=scores.device)


def _draw(scores: Tensor, rows: AbstractSequence[Row]) -> list[int]:
    """Sample from the distribution that temperature, top-k, top-p and min-p leave, by inversion."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=scores.device).unsqueeze(1)

    params = [row.sequence.sampling for row in rows]
    vocab = scores.shape[-1]
    values, tokens = scores.sort(dim=-1, descending=True)
    # from the best downwards, so that no temperature, however small, makes two infinities
    values = (values - values[:, :1]) / column([max(p.temperature, _MIN_TEMPERATURE) for p in params])
    rank = torch.arange(vocab, device=scores.device).unsqueeze(0)
    values = values.masked_fill(rank >= column([float(p.top_k or vocab) for p in params]), _MASKED)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = before >= column([p.top_p for p in params])
    dropped |= probabilities < column([p.min_p for p in params]) * probabilities[:, :1]
    dropped[:, 0] = False
    cumulative = probabilities.masked_fill(dropped, 0.0).double().cumsum(dim=-1)
    targets = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=scores.device).unsqueeze(1)
    # right=True skips tokens of no probability
    chosen = torch.searchsorted(cumulative, targets * cumulative[:, -1:], right=True).clamp_(max=vocab - 1)
    drawn: list[int] = tokens.gather(1, chosen).squeeze(1).tolist()
    return drawn


def _logprob(logits: Tensor, token: int, count: int | None) -> TokenLogprob | None:
    """Log-probabilities before temperature and penalties, as OpenAI and vLLM report them."""
    if count is None:
        return None
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(count, len(logprobs)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id=token, logprob=float(logprobs[token]), top=top)
