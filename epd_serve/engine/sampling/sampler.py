"""Sampling: from logits to tokens, the same on every instance and after every hand-off.

The random numbers of a token depend on (seed, choice index, position in the output) alone, so a sequence that
moves between instances goes on as if it had stayed. Temperature, min-p, top-k and top-p come in vLLM's order.

Top-p keeps a token if all likelier ones together have less than that share; so it keeps equals together. On a
CPU, and where the device has an operator for it, no vocabulary is sorted: a draw from the whole distribution is
thrown away where top-p does not keep it, and with it all that is no likelier; the next draw is among the rest.
That takes about 1 - ln(top_p) draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionOps
from device.copies import Readback, to_device
from epd_serve.engine.computing import ALL_FORBIDDEN, NO_TOKEN, SampledToken
from epd_serve.engine.sampling.constraints import mask_ends, restrict
from epd_serve.engine.step_inputs import StepInputs, on_device
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.sequence import Sequence
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

    @property
    def counters(self) -> tuple[int, int, int]:
        """The counters of the token's random numbers: seed, choice and position in the output."""
        return self.sampling.seed, self.index, len(self.sequence.output_ids) + 1

    def uniform(self, attempt: int = 0) -> float:
        """The token's random number in [0, 1), by Philox 4x64-10; another one for each attempt."""
        seed, key_1, first = self.counters
        key_0, second, third, fourth = seed & _WORD, attempt, 0, 0
        for _ in range(10):
            left, right = 0xD2E7_470E_E14C_6C93 * first, 0xCA5A_8263_9512_1157 * third
            first, second = (right >> 64) ^ second ^ key_0, right & _WORD
            third, fourth = (left >> 64) ^ fourth ^ key_1, left & _WORD
            key_0, key_1 = (key_0 + 0x9E37_79B9_7F4A_7C15) & _WORD, (key_1 + 0xBB67_AE85_84CA_A73B) & _WORD
        return (first >> 11) * 2.0**-53


def draw(scores: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Draw a token for each row of ``scores`` [rows, width], float32: [rows] int64. Without a word to the host."""
    params, width = [row.sampling for row in rows], scores.shape[1]

    def column(values: list[float]) -> Tensor:
        return on_device(values, scores.device, torch.float32).unsqueeze(1)

    best = scores - scores.amax(dim=-1, keepdim=True)
    best.div_(column([max(p.temperature, _MIN_TEMPERATURE) for p in params]))
    tokens: Tensor | None = None
    if any(p.top_k or p.top_p < 1.0 or p.min_p for p in params):
        best, tokens = best.sort(dim=-1, descending=True)
    if any(p.top_k for p in params):
        limits = column([float(min(p.top_k or width, width)) for p in params])
        best = best.masked_fill(torch.arange(width, device=best.device) >= limits, _MASKED)
    weights = best.exp()
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < column([p.min_p for p in params]), 0.0)
    kept = weights
    if any(p.top_p < 1.0 for p in params):
        ends = weights.cumsum(dim=-1)
        # the mass of all that are likelier: equals begin where the first of them does
        starts = torch.where(F.pad(best, (1, 0), value=math.inf)[:, :-1] == best, -1.0, ends - weights)
        dropped = starts.cummax(dim=-1).values >= column([p.top_p for p in params]) * ends[:, -1:]
        kept = kept.masked_fill(dropped & (best < best[:, :1]), 0.0)
    cumulative = kept.double().cumsum(dim=-1)
    uniforms = on_device([row.uniform() for row in rows], best.device, torch.float64).unsqueeze(1)
    # right=True skips tokens of no probability
    chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).clamp_(max=width - 1)
    return (chosen if tokens is None else tokens.gather(1, chosen)).squeeze(1)


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
        sampling, weights = row.sampling, self._weights[: self.width]
        weights.copy_(values)  # then the largest weight is 1
        best = weights.amax()
        if sampling.temperature >= _MIN_SCALED:
            torch.add(best / -sampling.temperature, weights, alpha=1 / sampling.temperature, out=weights)
        else:  # from the best downwards, so that no temperature, however small, makes two infinities
            weights.sub_(best).div_(max(sampling.temperature, _MIN_TEMPERATURE))
        weights.exp_()
        total = self._sum()
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

    def _drop(self, limit: float) -> float:
        """Leave only weights above a limit, and return their sum."""
        F.threshold(self._weights, limit, 0.0, inplace=True)
        return self._sum()

    def _sum(self) -> float:
        torch.sum(self._runs, dim=-1, out=self._sums)
        return float(self._sums_np.sum(dtype=np.float64))

    def _invert(self, uniform: float) -> int:
        """Return the token at which the weights' cumulative sum reaches this share of their total.

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


class DrawNumbers:
    """Counters and limits of :class:`device.base.Draw`, which stay on the device while the rows are the same."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._positions = np.zeros(0, np.int64)
        self._numbers: tuple[Tensor, Tensor]

    def of(self, rows: list[Row], device: torch.device) -> tuple[Tensor, Tensor]:
        """Those of the rows' next tokens; they hold until the next call."""
        positions = np.array([len(row.sequence.output_ids) for row in rows])
        if rows == self._rows and np.array_equal(positions, self._positions + 1):
            self._numbers[0][:, 2] += 1
        else:
            counters = np.array([row.counters for row in rows], dtype=np.uint64).view(np.int64)
            limits = torch.tensor([(p.temperature, p.min_p, p.top_p, p.top_k) for p in (r.sampling for r in rows)])
            limits[:, 0].clamp_(min=_MIN_TEMPERATURE)
            self._numbers = to_device(torch.from_numpy(counters), device), to_device(limits, device)
        self._rows, self._positions = rows, positions
        return self._numbers


class Sampling:
    """Tokens [rows] that the device chooses, and their log-probabilities, on the way to the host in one copy.

    Log-probabilities are those before temperature and penalties, as OpenAI and vLLM report them.

    Args:
        forbidden: some rows, and those of them for which ALL_FORBIDDEN stands.
        num_top: number of the likeliest tokens that rows want the log-probabilities of, by row.
    """

    def __init__(
        self, logits: Tensor, tokens: Tensor, forbidden: tuple[Tensor, Tensor] | None, num_top: dict[int, int]
    ) -> None:
        self.tokens, self._num_top = tokens, num_top
        chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        marked = torch.where(chosen.isnan(), NO_TOKEN, tokens)
        if forbidden is not None:
            rows, is_forbidden = forbidden
            marked = marked.index_copy(0, rows, torch.where(is_forbidden, ALL_FORBIDDEN, marked[rows]))
        if num_top:
            rows = on_device(list(num_top), logits.device)
            some = logits if len(rows) == len(logits) else logits[rows]
            values, indices = log_probabilities(some, tokens[rows], max(num_top.values()))
            # one copy for all: float32 as it is, in the bits of int32
            floats = values.view(torch.int32).flatten()
            marked = torch.cat([marked.int(), indices.int().flatten(), floats])
        self._readback = Readback(marked)

    def read(self) -> list[SampledToken]:
        """Wait for the tokens; called once. Raises FloatingPointError where one is not chosen yet."""
        packed, count = self._readback.wait(), len(self.tokens)
        ids = packed[:count].tolist()
        if min(ids) < ALL_FORBIDDEN:
            raise FloatingPointError("tokens were read before the device had chosen them, for want of an event")
        sampled = [SampledToken(token_id) for token_id in ids]
        if self._num_top:
            width = (len(packed) - count - len(self._num_top)) // (2 * len(self._num_top))
            end = count + width * len(self._num_top)
            top_ids = packed[count:end].view(len(self._num_top), -1).tolist()
            values = packed[end:].view(torch.float32).view(len(self._num_top), -1).tolist()
            details = zip(self._num_top.items(), top_ids, values, strict=True)
            for (row, num_top), top, (logprob, *top_logprobs) in details:
                pairs = list(zip(top, top_logprobs, strict=True))[:num_top]
                detail = TokenLogprob(token_id=ids[row], logprob=logprob, top=pairs)
                sampled[row] = SampledToken(ids[row], detail)
        return sampled


class Sampler:
    """Chooses one token for each row of logits. Holds what it needs again for the next step. Not thread-safe."""

    def __init__(self, ops: AttentionOps, eos_token_ids: frozenset[int]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._penalties = Penalties()
        self._numbers = DrawNumbers()
        self._scores = torch.empty(0, 0)
        self._drawers: dict[int, RowDrawer] = {}  # by width
        self._ends: Tensor | None = None  # the model's own end tokens
        self._rows: AbstractSequence[Row] = ()
        self._asking: list[int] = []  # rows that may be more than greedy
        self._bound: set[int] = set()  # rows of which something may be required or forbidden
        self._num_top: dict[int, int] = {}

    def sample(self, logits: Tensor, rows: AbstractSequence[Row]) -> Sampling:
        """Choose tokens from ``logits`` [len(rows), vocab]; does not wait for the device.

        ``rows`` never change, and may be given again. The largest is sought in the logits' own dtype; what is
        computed from them is float32.
        """
        if rows is not self._rows:  # a step often has those of the step before
            self._rows = rows
            self._bound = {i for i, row in enumerate(rows) if row.sampling.min_tokens > 0 or _is_constrained(row)}
            self._asking = [i for i, row in enumerate(rows) if i in self._bound or not row.sampling.greedy]
            self._num_top = {i: n for i, row in enumerate(rows) if (n := row.sampling.logprobs) is not None}
        plain: list[int] = []  # rows that are drawn from their logits as they are
        changed: list[int] = []
        for i in self._asking:
            # what was given up has no rules any more, and may lack the tokens that they are about
            if rows[i].sequence.is_active:
                if i in self._bound and _is_constrained(rows[i]):
                    changed.append(i)
                elif not rows[i].sampling.greedy:
                    (plain if logits.device.type == "cpu" else changed).append(i)
        if len(plain) + len(changed) < len(rows):
            tokens = self._ops.argmax(logits)
        else:
            tokens = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        if plain:
            tokens[plain] = torch.tensor([self._draw_row(logits[i], rows[i]) for i in plain])
        forbidden: tuple[Tensor, Tensor] | None = None
        if changed:
            scores = self._constrained(logits, rows, changed)
            if not self._bound.isdisjoint(changed):
                forbidden = on_device(changed, scores.device), scores.amax(dim=-1) == _MASKED
            for is_greedy in (True, False):
                places = [p for p, i in enumerate(changed) if rows[i].sampling.greedy == is_greedy]
                if places:
                    some = scores if len(places) == len(changed) else scores[on_device(places, scores.device)]
                    numbers = [changed[place] for place in places]
                    chosen = self._ops.argmax(some) if is_greedy else self._draw(some, [rows[i] for i in numbers])
                    where = on_device(numbers, tokens.device)
                    tokens = chosen if len(places) == len(rows) else tokens.index_copy(0, where, chosen)
        return Sampling(logits, tokens, forbidden, self._num_top)

    def _draw(self, scores: Tensor, rows: list[Row]) -> Tensor:
        if scores.device.type == "cpu":
            return torch.tensor([self._draw_row(values, row) for values, row in zip(scores, rows, strict=True)])
        if self._ops.draw is None:
            return draw(scores, rows)
        return self._ops.draw(scores, *self._numbers.of(rows, scores.device))

    def _draw_row(self, values: Tensor, row: Row) -> int:
        """Draw from logits [vocab] on a CPU."""
        count = min(row.sampling.top_k, len(values)) or len(values)
        drawer = self._drawers.get(count)
        if drawer is None:
            drawer = self._drawers[count] = RowDrawer(count)
        if count == len(values):
            return drawer.draw(values, row)
        best, tokens = largest(values.unsqueeze(0), count)
        return int(tokens[0, drawer.draw(best[0], row)])

    def _constrained(self, logits: Tensor, rows: AbstractSequence[Row], which: list[int]) -> Tensor:
        """Rows in float32 with penalties, min_tokens and what requests forbid, [len(which), vocab]."""
        some = logits if len(which) == len(logits) else logits[on_device(which, logits.device)]
        if logits.device.type != "cpu":
            scores = some.to(torch.float32, copy=True)
        else:  # in memory that stays
            if len(self._scores) < len(some) or self._scores.shape[1:] != logits.shape[1:]:
                self._scores = torch.empty(some.shape)
            scores = self._scores[: len(some)].copy_(some)
        if self._bound.isdisjoint(which):
            return scores
        changed = [rows[i] for i in which]
        self._penalties.apply(scores, changed)
        for values, row in zip(scores, changed, strict=True):
            if len(row.sequence.output_ids) < row.sampling.min_tokens:
                if self._ends is None:
                    ends = [token for token in self._eos_token_ids if token < len(values)]
                    self._ends = on_device(ends, scores.device)
                mask_ends(values, row.sequence, self._ends)
        restrict(scores, [row.sequence for row in changed])
        return scores


def _is_constrained(row: Row) -> bool:
    """Whether the scores of a row change before a token is chosen, by its newest tokens among others."""
    sampling, sequence = row.sampling, row.sequence
    is_restricted = sampling.has_token_lists or sequence.constraint is not None
    return is_restricted or sampling.penalised or len(sequence.output_ids) < sampling.min_tokens


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of one token a row, then of the likeliest ones, best first.

    Returns:
        Log-probabilities [rows, 1 + num_top] in float32, and the likeliest tokens [rows, num_top].
    """
    scores = logits.float()
    chosen = scores.gather(1, tokens.unsqueeze(1))
    best, indices = largest(scores, min(num_top, scores.shape[1]))
    return torch.cat([chosen, best], dim=1) - scores.logsumexp(dim=-1, keepdim=True), indices


class Penalties:
    """Repetition over prompt and output, presence and frequency over the output; each token is counted once."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def apply(self, scores: Tensor, rows: AbstractSequence[Row]) -> None:
        """Change the scores [rows, width], which are contiguous, of the rows that ask for it."""
        parts: list[tuple[npt.NDArray[Any], ...]] = []  # tokens, what each of them loses, repetition
        for i, row in enumerate(rows):
            if row.sampling.penalised:
                history = self._histories.get(row.sequence)
                if history is None:
                    history = self._histories[row.sequence] = _History(row.sequence)
                history.take(row.sequence.output_ids)
                count = len(history.places)
                factors = np.full(count, row.sampling.repetition_penalty, np.float32)
                parts.append((history.ids[:count] + i * scores.shape[1], history.amounts[:count], factors))
        if not parts:
            return
        where, amount, factor = (
            to_device(torch.from_numpy(np.concatenate(one)), scores.device) for one in zip(*parts, strict=True)
        )
        flat = scores.view(-1)
        values = flat.index_select(0, where)
        flat.index_copy_(0, where, torch.where(values > 0, values / factor, values * factor) - amount)


class _History:
    """The distinct tokens of a sequence that count, and what each of them loses, by place."""

    def __init__(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._seen: set[int] = set()
        self._num_taken = 0
        self.places: dict[int, int] = {}
        self.ids = np.zeros(64, np.int64)
        self.amounts = np.zeros(64, np.float32)
        if sampling.repetition_penalty != 1.0:
            for token in sequence.prompt_ids:
                self._place(token)

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
        place = self.places.setdefault(token, len(self.places))
        if place == len(self.ids):
            self.ids, self.amounts = np.resize(self.ids, 2 * place), np.resize(self.amounts, 2 * place)
            self.amounts[place:] = 0.0
        self.ids[place] = token
        return place


#: Rows whose logits exist at a time: a vocabulary of 152,000 has 78 MB of them in float32.
_PIECE = 128


class PromptLogprobs:
    """The log-probabilities that one step's inputs ask for (:class:`epd_serve.models.language.MoreLogits`)."""

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        starts = range(0, len(inputs.scored_rows), _PIECE)
        self._rows = [on_device(inputs.scored_rows[i : i + _PIECE], device) for i in starts]
        self._targets = [on_device(inputs.scored_ids[i : i + _PIECE], device) for i in starts]
        self._inputs = inputs
        self._taken: list[tuple[Tensor, Tensor]] = []

    def pieces(self) -> Iterator[Tensor]:
        return iter(self._rows)

    def take(self, logits: Tensor) -> None:
        targets = self._targets[len(self._taken)]
        self._taken.append(log_probabilities(logits, targets, self._inputs.num_top))

    def send(self) -> None:
        """Start the copy to the host."""
        values, indices = zip(*self._taken, strict=True)
        self._values, self._indices = Readback(torch.cat(values)), Readback(torch.cat(indices))

    def hand_out(self) -> None:
        """Wait for the log-probabilities, and give each sequence those of its known tokens."""
        inputs, values, indices = self._inputs, self._values.wait().tolist(), self._indices.wait().tolist()
        details = zip(inputs.scored, inputs.scored_ids, values, indices, strict=True)
        for (sequence, index), token_id, (logprob, *top_logprobs), top in details:
            pairs = list(zip(top, top_logprobs, strict=True))[: sequence.sampling.logprobs or 0]
            sequence.logprobs[index] = TokenLogprob(token_id=token_id, logprob=logprob, top=pairs)
