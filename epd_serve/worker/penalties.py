"""Penalties for tokens that came before, as the OpenAI and vLLM APIs define them."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from epd_serve.request import Sequence
from epd_serve.worker.drawing import Row
from epd_serve.worker.step_inputs import move

Array = npt.NDArray[Any]


class Penalties:
    """Repetition over prompt and output, presence and frequency over the output; each token is counted once."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def apply(self, scores: Tensor, rows: AbstractSequence[Row]) -> None:
        """Change the scores [rows, width], which are contiguous, of the rows that ask for it."""
        ids: list[Array] = []
        amounts: list[Array] = []
        factors: list[Array] = []
        for i, row in enumerate(rows):
            if row.sampling.penalised:
                history = self._histories.get(row.sequence)
                if history is None:
                    history = self._histories[row.sequence] = _History(row.sequence)
                history.take(row.sequence.output_ids)
                ids.append(history.ids[: history.count] + i * scores.shape[1])
                amounts.append(history.amounts[: history.count])
                factors.append(np.full(history.count, row.sampling.repetition_penalty, np.float32))
        if not ids:
            return
        where, amount, factor = (
            move(torch.from_numpy(np.concatenate(parts)), scores.device) for parts in (ids, amounts, factors)
        )
        flat = scores.view(-1)
        values = flat.index_select(0, where)
        flat.index_copy_(0, where, torch.where(values > 0, values / factor, values * factor) - amount)


class _History:
    """The distinct tokens of a sequence that count, and what each of them loses."""

    def __init__(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._places: dict[int, int] = {}
        self._seen: set[int] = set()
        self._num_taken = 0
        self.ids = np.zeros(64, np.int64)
        self.amounts = np.zeros(64, np.float32)
        if sampling.repetition_penalty != 1.0:
            for token in sequence.prompt_ids:
                self._place(token)

    @property
    def count(self) -> int:
        return len(self._places)

    def take(self, output_ids: list[int]) -> None:
        """Count the tokens that are new."""
        for token in output_ids[self._num_taken :]:
            place = self._place(token)
            if token not in self._seen:
                self._seen.add(token)
                self.amounts[place] += self._presence
            self.amounts[place] += self._frequency
        self._num_taken = len(output_ids)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self.ids):
            self.ids, self.amounts = np.resize(self.ids, 2 * place), np.resize(self.amounts, 2 * place)
            self.amounts[place:] = 0.0
        self.ids[place] = token
        return place
