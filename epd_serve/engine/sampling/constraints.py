"""Restrictions that a request puts on tokens (biases, allowed tokens, bad words, a grammar)."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from device.copies import to_device
from epd_serve.engine.sampling.patterns import Node, Patterns
from epd_serve.engine.step_inputs import on_device
from epd_serve.sched.sequence import Sequence
from epd_serve.types import Grammar, SamplingParams

_MASKED = float("-inf")
_BITS = 32


class Constraint(Protocol):
    """A grammar, and one choice's position in it. Used by one thread at a time."""

    error: str
    grammar: Grammar

    def allowed(self, output_ids: AbstractSequence[int]) -> NDArray[np.int32]:
        """The tokens that may follow: one bit each, [vocab / 32]. ``output_ids`` only grow from call to call."""
        ...

    def fork(self) -> Constraint:
        """Return the same state for another choice."""
        ...


def mask_ends(scores: Tensor, sequence: Sequence, eos_token_ids: Tensor) -> None:
    """Let a sequence not end with its next token: ``scores`` [vocab], float32, changes in place."""
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
            if rules.bad_words is not None and (banned := rules.bad_words.banned(sequence)) is not None:
                scores[i, banned] = _MASKED
        if sequence.constraint is not None:
            masks.append((i, sequence.constraint.allowed(sequence.output_ids)))
    if masks:
        _mask(scores, masks)


class _Rules:
    """The meaning of a request's lists for its scores. All choices share it, for as long as one of them lives."""

    def __init__(self, sampling: SamplingParams, scores: Tensor) -> None:
        self.sampling = sampling  # its id is no other's as long as it is here
        self.place = (scores.shape[-1], scores.device)
        stop_tokens = [token for token in sampling.stop_token_ids if token < scores.shape[-1]]
        self.stop_tokens = on_device(stop_tokens, scores.device)
        biases = {token: bias for token, bias in sampling.logit_bias.items() if token < scores.shape[-1]}
        self.biased = on_device(list(biases), scores.device)
        self.biases = on_device(list(biases.values()), scores.device, torch.float32)
        self.forbidden: Tensor | None = None
        if sampling.allowed_token_ids:
            allowed = torch.tensor(sampling.allowed_token_ids, dtype=torch.long)
            forbidden = torch.ones(scores.shape[-1], dtype=torch.bool)
            forbidden[allowed[allowed < len(forbidden)]] = False
            self.forbidden = to_device(forbidden, scores.device)
        self.bad_words = _BadWords(sampling.bad_word_ids, scores) if sampling.bad_word_ids else None


_rules: WeakKeyDictionary[Sequence, _Rules] = WeakKeyDictionary()
_shared: WeakValueDictionary[int, _Rules] = WeakValueDictionary()


def _rules_of(sequence: Sequence, scores: Tensor) -> _Rules:
    place = (scores.shape[-1], scores.device)
    for rules in (_rules.get(sequence), _shared.get(id(sequence.sampling))):
        if rules is not None and rules.place == place:
            break
    else:
        rules = _shared[id(sequence.sampling)] = _Rules(sequence.sampling, scores)
    _rules[sequence] = rules
    return rules


class _BadWords:
    """The bad words of a request, and how far the output of each choice has come in them."""

    def __init__(self, words: tuple[tuple[int, ...], ...], scores: Tensor) -> None:
        self._scores = scores.new_empty(0)
        last: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if word[-1] < scores.shape[-1]:
                last.setdefault(word[:-1], set()).add(word[-1])
        self._last = last
        self._patterns = Patterns(last)
        self._banned: dict[Node, tuple[frozenset[int], Tensor]] = {}
        self._read: WeakKeyDictionary[Sequence, tuple[int, Node]] = WeakKeyDictionary()

    def banned(self, sequence: Sequence) -> Tensor | None:
        """The last tokens of the words whose other tokens end the output, which only grows from call to call."""
        count, node = self._read.get(sequence, (0, self._patterns.root))
        output_ids = sequence.output_ids
        for place in range(count, len(output_ids)):
            node = self._patterns.step(node, output_ids[place])
        self._read[sequence] = (len(output_ids), node)
        return None if node.ends is None else self._of(node.ends)[1]

    def _of(self, ends: Node) -> tuple[frozenset[int], Tensor]:
        """For the longest beginning of a word, with those that end like it."""
        nodes: list[Node] = []
        shorter: Node | None = ends
        while shorter is not None and shorter not in self._banned:
            nodes.append(shorter)
            shorter = None if shorter is self._patterns.root else shorter.fail.ends
        tokens = frozenset[int]() if shorter is None else self._banned[shorter][0]
        for node in reversed(nodes):
            tokens |= self._last[tuple(self._patterns.pattern(node))]
            self._banned[node] = (tokens, on_device(sorted(tokens), self._scores.device))
        return self._banned[ends]


def _mask(scores: Tensor, masks: list[tuple[int, NDArray[np.int32]]]) -> None:
    rows = on_device([i for i, _ in masks], scores.device)
    packed = to_device(torch.from_numpy(np.stack([mask for _, mask in masks])), scores.device)
    bits = (packed.unsqueeze(-1) >> torch.arange(_BITS, device=scores.device, dtype=torch.int32)) & 1
    allowed = bits.view(len(masks), -1).bool()[:, : scores.shape[-1]]
    missing = scores.shape[-1] - allowed.shape[-1]  # rows of the embedding that stand for no token
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing))
    scores[rows] = scores[rows].masked_fill_(~allowed, _MASKED)
