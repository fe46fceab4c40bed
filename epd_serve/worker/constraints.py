"""Restrictions that a request puts on tokens: biases, allowed tokens, bad words, a grammar."""

from __future__ import annotations

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
    allowed = _allowed_masks.of(sequences, scores)
    for i, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.logit_bias:
            biases = {token: bias for token, bias in sampling.logit_bias.items() if token < vocab}
            scores[i, _ids(scores, biases)] += torch.tensor(list(biases.values()), device=scores.device)
        if i in allowed:
            scores[i].masked_fill_(~allowed[i], _MASKED)
        if banned := _banned(sampling, sequence.output_ids, vocab):
            scores[i, _ids(scores, banned)] = _MASKED
        if sequence.constraint is not None:
            masks.append((i, sequence.constraint.allowed(sequence.output_ids)))
    if masks:
        _mask(scores, masks)


class _AllowedMasks:
    """Masks of allowed tokens, kept from step to step, as a list may have the whole vocabulary."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def of(self, sequences: AbstractSequence[Sequence], scores: Tensor) -> dict[int, Tensor]:
        """Return masks [vocab], true for allowed tokens, by the sequence's place; drop those of the last step."""
        masks: dict[int, Tensor] = {}
        kept: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        for i, sequence in enumerate(sequences):
            if token_ids := sequence.sampling.allowed_token_ids:
                own = kept.get(id(token_ids)) or self._kept.get(id(token_ids))
                if own is None or (own[1].shape[0], own[1].device) != (scores.shape[-1], scores.device):
                    own = token_ids, _mask_of(token_ids, scores)
                kept[id(token_ids)] = own  # with the ids themselves, so that their id is no other's
                masks[i] = own[1]
        self._kept = kept
        return masks


_allowed_masks = _AllowedMasks()


def _mask_of(token_ids: tuple[int, ...], scores: Tensor) -> Tensor:
    mask = torch.zeros(scores.shape[-1], dtype=torch.bool)
    ids = torch.tensor(token_ids, dtype=torch.long)
    mask[ids[ids < len(mask)]] = True
    return mask.to(scores.device)


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
