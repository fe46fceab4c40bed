"""A request's restrictions on tokens: biases, allowed tokens, bad words, a grammar."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from device.copies import to_device
from epd_serve.engine.step_inputs import on_device
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

_MASKED = float("-inf")
_BITS = 32


def mask_ends(scores: Tensor, sequence: Sequence, eos_token_ids: Tensor) -> None:
    """Forbid ends of the sequence as its next token in ``scores`` [vocab], float32, in place."""
    scores.index_fill_(0, eos_token_ids, _MASKED)
    if sequence.sampling.stop_token_ids:
        scores.index_fill_(0, _rules_of(sequence, scores).stop_tokens, _MASKED)


def restrict(scores: Tensor, sequences: AbstractSequence[Sequence]) -> None:
    """Apply the requests' restrictions to ``scores`` [len(sequences), vocab], float32, in place."""
    masks: list[tuple[int, NDArray[np.int32]]] = []
    for i, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.has_token_lists:
            rules = _rules_of(sequence, scores)
            if sampling.logit_bias:
                scores[i, rules.biased] += rules.biases
            if rules.forbidden is not None:
                scores[i].masked_fill_(rules.forbidden, _MASKED)
            if rules.bad_words is not None and (banned := rules.bad_words.banned(sequence.output_ids)) is not None:
                scores[i, banned] = _MASKED
        if sequence.constraint is not None:
            masks.append((i, sequence.constraint.allowed(sequence.output_ids)))
    if masks:
        _mask(scores, masks)


class _Rules:
    """A request's token lists as tensors."""

    def __init__(self, sampling: SamplingParams, width: int, device: torch.device) -> None:
        self.stop_tokens = on_device([token for token in sampling.stop_token_ids if token < width], device)
        biases = {token: bias for token, bias in sampling.logit_bias.items() if token < width}
        self.biased = on_device(list(biases), device)
        self.biases = on_device(list(biases.values()), device, torch.float32)
        self.forbidden: Tensor | None = None
        if sampling.allowed_token_ids:
            allowed = torch.tensor(sampling.allowed_token_ids, dtype=torch.long)
            forbidden = torch.ones(width, dtype=torch.bool)
            forbidden[allowed[allowed < width]] = False
            self.forbidden = to_device(forbidden, device)
        self.bad_words = _BadWords(sampling.bad_word_ids, width, device) if sampling.bad_word_ids else None


def _rules_of(sequence: Sequence, scores: Tensor) -> _Rules:
    place = scores.shape[-1], scores.device
    if place not in sequence.rules:
        sequence.rules[place] = _Rules(sequence.sampling, *place)
    rules: _Rules = sequence.rules[place]
    return rules


class _BadWords:
    """The last tokens of a request's bad words, by the tokens before them."""

    def __init__(self, words: tuple[tuple[int, ...], ...], width: int, device: torch.device) -> None:
        last: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if word[-1] < width:
                last.setdefault(word[:-1], []).append(word[-1])
        self._last = {before: on_device(tokens, device) for before, tokens in last.items()}
        self._lengths = sorted({len(before) for before in last})

    def banned(self, output_ids: list[int]) -> Tensor | None:
        """Return the last tokens of the words whose other tokens end the output."""
        ends = (tuple(output_ids[len(output_ids) - length :]) for length in self._lengths)
        found = [self._last[end] for end in ends if end in self._last]
        return torch.cat(found) if found else None


def _mask(scores: Tensor, masks: list[tuple[int, NDArray[np.int32]]]) -> None:
    rows = on_device([i for i, _ in masks], scores.device)
    packed = to_device(torch.from_numpy(np.stack([mask for _, mask in masks])), scores.device)
    bits = (packed.unsqueeze(-1) >> torch.arange(_BITS, device=scores.device, dtype=torch.int32)) & 1
    allowed = bits.view(len(masks), -1).bool()[:, : scores.shape[-1]]
    missing = scores.shape[-1] - allowed.shape[-1]  # embedding rows without a token
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing))
    scores[rows] = scores[rows].masked_fill_(~allowed, _MASKED)
