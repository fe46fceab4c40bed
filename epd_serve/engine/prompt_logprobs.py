"""Log-probabilities of tokens that are known already: of a prompt, or of an answer that goes on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from epd_serve.engine.sampler import Readback, log_probabilities
from epd_serve.engine.step_inputs import StepInputs, integers
from epd_serve.protocol.wire import TokenLogprob

#: Rows whose logits exist at a time: a vocabulary of 152,000 has 78 MB of them in float32.
_PIECE = 128


class PromptLogprobs:
    """The log-probabilities that one step's inputs ask for (:class:`epd_serve.models.language.MoreLogits`)."""

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        starts = range(0, len(inputs.scored_rows), _PIECE)
        self._rows = [integers(inputs.scored_rows[i : i + _PIECE], device) for i in starts]
        self._targets = [integers(inputs.scored_ids[i : i + _PIECE], device) for i in starts]
        self._num_top = inputs.num_top
        self._tokens = inputs.scored_ids
        self._taken: list[tuple[Tensor, Tensor]] = []

    def pieces(self) -> Iterator[Tensor]:
        return iter(self._rows)

    def take(self, logits: Tensor) -> None:
        targets = self._targets[len(self._taken)]
        self._taken.append(log_probabilities(logits, targets, self._num_top))

    def send(self) -> None:
        """Start the copy to the host."""
        values, indices = zip(*self._taken, strict=True)
        self._values, self._indices = Readback(torch.cat(values)), Readback(torch.cat(indices))

    def read(self) -> list[TokenLogprob]:
        """Wait for the log-probabilities of the inputs' ``scored_ids``, with ``num_top`` alternatives each."""
        rows = zip(self._tokens, self._values.wait().tolist(), self._indices.wait().tolist(), strict=True)
        return [
            TokenLogprob(token_id=token, logprob=own, top=list(zip(ids, top, strict=True)))
            for token, (own, *top), ids in rows
        ]
