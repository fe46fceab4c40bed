"""Sampling: from logits to tokens, the same on every instance and after every hand-off.

The random numbers of a token depend on (seed, choice index, position in the output) alone, so a sequence that
moves between instances goes on as if it had stayed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from device.base import AttentionOps
from epd_serve.engine.constraints import is_restricted, mask_ends, restrict
from epd_serve.engine.sampling_kernels import Row, RowDrawer, draw, draw_from_largest, largest
from epd_serve.engine.step_inputs import move, on_device
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.request import Sequence

_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Tokens that the device chooses.

    Attributes:
        tokens: [rows] int64, on the device.
        read: waits for them; called once.
    """

    tokens: Tensor
    read: Callable[[], list[SampledToken]]


class Sampler:
    """Chooses one token for each row of logits. Holds what it needs again for the next step. Not thread-safe."""

    def __init__(self, ops: AttentionOps, eos_token_ids: frozenset[int]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._penalties = Penalties()
        self._scores = torch.empty(0, 0)
        self._drawer: RowDrawer | None = None
        self._ends: Tensor | None = None

    def sample(self, logits: Tensor, rows: AbstractSequence[Row]) -> Sampling:
        """Choose tokens from ``logits`` [len(rows), vocab]; does not wait for the device.

        The largest is sought in the logits' own dtype; what is computed from them is float32.
        """
        # what was given up has no rules any more, and may lack the tokens that they are about
        ruled = [i for i, row in enumerate(rows) if row.sequence.goes_on]
        worked = [i for i in ruled if not rows[i].sampling.greedy or _is_constrained(rows[i])]
        tokens = self._work(logits, rows, worked) if worked else self._ops.argmax(logits)
        counts = {i: n for i, row in enumerate(rows) if (n := row.sampling.logprobs) is not None}
        if counts:
            return _with_logprobs(logits, tokens, counts)
        ids = Readback(tokens)
        return Sampling(tokens, lambda: [SampledToken(token) for token in ids.wait().tolist()])

    def _work(self, logits: Tensor, rows: AbstractSequence[Row], worked: list[int]) -> Tensor:
        """Tokens of rows of which ``worked`` are more than greedy."""
        if len(worked) < len(rows):
            tokens = self._ops.argmax(logits)
        else:
            tokens = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        by_rows = [i for i in worked if logits.device.type == "cpu" and _is_plain(rows[i])]
        copied = [i for i in worked if i not in by_rows]
        scores = self._constrained(logits, rows, copied) if copied else logits
        ways: dict[Callable[[Tensor, list[Row]], Tensor], list[int]] = {}
        for place, i in enumerate(copied):
            ways.setdefault(self._way(rows[i], logits.device.type), []).append(place)
        for way, places in ways.items():
            some = scores if len(places) == len(copied) else scores[on_device(scores, places)]
            chosen = way(some, [rows[copied[place]] for place in places])
            tokens = tokens.index_copy(0, on_device(tokens, [copied[place] for place in places]), chosen)
        if by_rows:
            drawn = self._draw_rows([logits[i] for i in by_rows], [rows[i] for i in by_rows])
            tokens[by_rows] = drawn
        return tokens

    def _way(self, row: Row, device_type: str) -> Callable[[Tensor, list[Row]], Tensor]:
        if row.sampling.greedy:
            return self._argmax
        if device_type != "cpu":
            return draw
        return draw_from_largest if row.sampling.top_k else self._draw_rows

    def _argmax(self, scores: Tensor, rows: list[Row]) -> Tensor:
        return self._ops.argmax(scores)

    def _draw_rows(self, scores: Tensor | list[Tensor], rows: list[Row]) -> Tensor:
        if self._drawer is None or self._drawer.width != len(scores[0]):
            self._drawer = RowDrawer(len(scores[0]))
        return torch.tensor([self._drawer.draw(values, row) for values, row in zip(scores, rows, strict=True)])

    def _constrained(self, logits: Tensor, rows: AbstractSequence[Row], which: list[int]) -> Tensor:
        """Rows in float32 with penalties, min_tokens and what requests forbid, [len(which), vocab]."""
        some = [rows[i] for i in which]
        scores = self._copy(logits, which)
        self._penalties.apply(scores, some)
        for values, row in zip(scores, some, strict=True):
            if _is_held_back(row):
                mask_ends(values, row.sequence, self._ends_on(values))
        restrict(scores, [row.sequence for row in some])
        return scores

    def _ends_on(self, scores: Tensor) -> Tensor:
        """The model's own end tokens, where ``scores`` [vocab] are."""
        if self._ends is None:
            self._ends = on_device(scores, [token for token in self._eos_token_ids if token < len(scores)])
        return self._ends

    def _copy(self, logits: Tensor, which: list[int]) -> Tensor:
        """Rows in float32; on a CPU in memory that stays."""
        some = logits if len(which) == len(logits) else logits[on_device(logits, which)]
        if logits.device.type != "cpu":
            return some.to(torch.float32, copy=True)
        if len(self._scores) < len(some) or self._scores.shape[1:] != logits.shape[1:]:
            self._scores = torch.empty(some.shape)
        return self._scores[: len(some)].copy_(some)


class Readback:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._copy = tensor
        if tensor.device.type != "cpu":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def _is_held_back(row: Row) -> bool:
    return len(row.sequence.output_ids) < row.sampling.min_tokens


def _is_plain(row: Row) -> bool:
    """Whether a row can be drawn from its logits as they are."""
    return not (row.sampling.greedy or row.sampling.top_k or _is_constrained(row))


def _is_constrained(row: Row) -> bool:
    return row.sampling.penalised or _is_held_back(row) or is_restricted(row.sequence)


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of one token a row, then of the likeliest ones, best first.

    Returns:
        Log-probabilities [rows, 1 + num_top] in float32, and the likeliest tokens [rows, num_top].
    """
    scores = logits.float()
    chosen = scores.gather(1, tokens.unsqueeze(1))
    best, indices = largest(scores, min(num_top, scores.shape[1]))
    return torch.cat([chosen, best], dim=1) - scores.logsumexp(dim=-1, keepdim=True), indices


def _with_logprobs(logits: Tensor, tokens: Tensor, counts: dict[int, int]) -> Sampling:
    """Log-probabilities before temperature and penalties, as OpenAI and vLLM report them.

    Args:
        counts: number of the best ones that each row wants, by row.
    """
    rows = on_device(logits, list(counts))
    some = logits if len(rows) == len(logits) else logits[rows]
    values, indices = log_probabilities(some, tokens[rows], max(counts.values()))
    # one copy for all: float32 as it is, in the bits of int32
    floats = values.view(torch.int32)
    readback = Readback(torch.cat([tokens.int(), indices.int().flatten(), floats.flatten()]))
    count_ids, count_top = len(tokens), indices.numel()

    def read() -> list[SampledToken]:
        packed = readback.wait()
        sampled = [SampledToken(token) for token in packed[:count_ids].tolist()]
        top_ids = packed[count_ids : count_ids + count_top].view(len(counts), -1).tolist()
        values = packed[count_ids + count_top :].view(torch.float32).view(len(counts), -1).tolist()
        details = zip(counts.items(), top_ids, values, strict=True)
        for (i, count), top, (logprob, *top_logprobs) in details:
            token_id = sampled[i].token_id
            pairs = list(zip(top, top_logprobs, strict=True))[:count]
            sampled[i] = SampledToken(token_id, TokenLogprob(token_id=token_id, logprob=logprob, top=pairs))
        return sampled

    return Sampling(tokens, read)


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
