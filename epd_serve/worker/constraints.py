"""Restrictions that a request puts on tokens: biases, allowed tokens, bad words, a grammar."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as AbstractSequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd_serve.request import Sequence
from epd_serve.types import SamplingParams

_MASKED = float("-inf")
_BITS = 32
_MAX_KEPT = 64


class Constraint(Protocol):
    """A grammar, and one choice's position in it. Used by one thread at a time."""

    error: str

    def allowed(self, output_ids: AbstractSequence[int]) -> NDArray[np.int32]:
        """The tokens that may follow: one bit each, [vocab / 32]. ``output_ids`` only grow from call to call."""
        ...

    def fork(self) -> Constraint:
        """Return the same state for another choice."""
        ...


def is_restricted(sequence: Sequence) -> bool:
    """Whether :func:`restrict` changes the sequence's scores, which then depend on its newest token."""
    sampling = sequence.sampling
    return (
        sequence.constraint is not None
        or bool(sampling.logit_bias)
        or bool(sampling.allowed_token_ids)
        or bool(sampling.bad_word_ids)
    )


def restrict(scores: Tensor, sequences: AbstractSequence[Sequence]) -> None:
    """Apply the requests' restrictions to ``scores`` [len(sequences), vocab], float32, in place."""
    vocab = scores.shape[-1]
    masks: list[tuple[int, NDArray[np.int32]]] = []
    for i, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            biases = {token: bias for token, bias in sampling.logit_bias.items() if token < vocab}
            scores[i, _ids(scores, biases)] += torch.tensor(list(biases.values()), device=scores.device)
        if sampling.allowed_token_ids:
            allowed = _allowed.mask(sampling.allowed_token_ids, scores)
            scores[i].masked_fill_(~allowed, _MASKED)
        if banned := _banned(sampling, sequence.output_ids, vocab):
            scores[i, _ids(scores, banned)] = _MASKED
        if sequence.constraint is not None:
            masks.append((i, sequence.constraint.allowed(sequence.output_ids)))
    if masks:
        _mask(scores, masks)


class _AllowedTokens:
    """Masks of allowed tokens on the device, as a list may have the whole vocabulary and serves every step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[tuple[int, ...], Tensor]] = OrderedDict()

    def mask(self, token_ids: tuple[int, ...], scores: Tensor) -> Tensor:
        """A mask [vocab] that is true for the ids. ``token_ids`` is kept with it, so that its id is no other's."""
        kept, place = self._kept.get(id(token_ids)), (scores.shape[-1], scores.device)
        if kept is None or (kept[1].shape[0], kept[1].device) != place:
            mask = torch.zeros(scores.shape[-1], dtype=torch.bool)
            ids = torch.tensor(token_ids, dtype=torch.long)
            mask[ids[ids < len(mask)]] = True
            kept = self._kept[id(token_ids)] = (token_ids, mask.to(scores.device))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return kept[1]


_allowed = _AllowedTokens()


def _banned(sampling: SamplingParams, output_ids: list[int], vocab: int) -> list[int]:
    """The last tokens of the bad words whose other tokens end the output."""
    return [
        word[-1]
        for word in sampling.bad_word_ids
        if word[-1] < vocab and (len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1])
    ]


def _mask(scores: Tensor, masks: list[tuple[int, NDArray[np.int32]]]) -> None:
    rows = _ids(scores, [i for i, _ in masks])
    packed = torch.from_numpy(np.stack([mask for _, mask in masks])).to(scores.device)
    bits = (packed.unsqueeze(-1) >> torch.arange(_BITS, device=scores.device, dtype=torch.int32)) & 1
    allowed = bits.view(len(masks), -1).bool()[:, : scores.shape[-1]]
    missing = scores.shape[-1] - allowed.shape[-1]  # rows of the embedding that stand for no token
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing))
    scores[rows] = scores[rows].masked_fill_(~allowed, _MASKED)


def _ids(scores: Tensor, values: AbstractSequence[int] | dict[int, float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=scores.device)
