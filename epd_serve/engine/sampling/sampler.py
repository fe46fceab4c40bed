"""Sampling: from logits to tokens, identical on every instance and after every hand-off.

The random numbers of a token depend only on (seed, choice index, position in the output), so a sequence continues
on another instance as if it had never moved. Temperature, min-p, top-k and top-p are applied in vLLM's order.

Top-p keeps a token if the total probability of likelier tokens is below top_p, so tokens of equal probability are
kept or dropped together. A CPU, or a device with a draw operator, avoids sorting the vocabulary: if top-p rejects
a draw from the whole distribution, it also rejects all tokens of equal or lower probability, and the next draw is
from the rest. This takes about 1 - ln(top_p) draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
from epd_serve.engine.engine import ALL_FORBIDDEN, NO_TOKEN, SampledToken
from epd_serve.engine.sampling.constraints import mask_ends, restrict
from epd_serve.engine.step_inputs import StepInputs, on_device
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

#: Tokens per run: runs are searched by their maximum or by their sum of weights.
_BEST_RUN, _SUM_RUN = 64, 256
_MASKED = float("-inf")
#: The smallest divisor at which float32 keeps full precision.
_MIN_TEMPERATURE = 1.2e-38
#: Temperature from which logits are scaled before the largest is subtracted.
_MIN_SCALED = 0.1
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Row:
    """A token to sample: its sequence and choice."""

    sequence: Sequence
    index: int

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def counters(self) -> tuple[int, int, int]:
        """Counters of the token's random numbers, unsigned: seed, choice and position in the output."""
        return self.sampling.seed & _WORD, self.index, len(self.sequence.output_ids) + 1

    def uniform(self, attempt: int = 0) -> float:
        """Return a random number in [0, 1) for this token and attempt, by Philox 4x64-10."""
        key_0, key_1, first = self.counters
        second, third, fourth = attempt, 0, 0
        for _ in range(10):
            left, right = 0xD2E7_470E_E14C_6C93 * first, 0xCA5A_8263_9512_1157 * third
            first, second = (right >> 64) ^ second ^ key_0, right & _WORD
            third, fourth = (left >> 64) ^ fourth ^ key_1, left & _WORD
            key_0, key_1 = (key_0 + 0x9E37_79B9_7F4A_7C15) & _WORD, (key_1 + 0xBB67_AE85_84CA_A73B) & _WORD
        return (first >> 11) * 2.0**-53


def draw(scores: Tensor, rows: AbstractSequence[Row]) -> Tensor:
    """Draw tokens [rows] int64 from ``scores`` [rows, width], float32, without synchronising with the host."""
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
        # probability of all likelier tokens, the same for tokens of equal probability
        starts = torch.where(F.pad(best, (1, 0), value=math.inf)[:, :-1] == best, -1.0, ends - weights)
        dropped = starts.cummax(dim=-1).values >= column([p.top_p for p in params]) * ends[:, -1:]
        kept = kept.masked_fill(dropped & (best < best[:, :1]), 0.0)
    cumulative = kept.double().cumsum(dim=-1)
    uniforms = on_device([row.uniform() for row in rows], best.device, torch.float64).unsqueeze(1)
    # right=True skips tokens of zero probability
    chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True).clamp_(max=width - 1)
    return (chosen if tokens is None else tokens.gather(1, chosen)).squeeze(1)


class RowDrawer:
    """Draws on a CPU, row by row, so that each row stays in a core's cache."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._weights = torch.zeros(-(-width // _SUM_RUN) * _SUM_RUN)
        self._runs = self._weights.view(-1, _SUM_RUN)
        self._sums = torch.empty(len(self._runs))
        self._weights_np, self._sums_np = self._weights.numpy(), self._sums.numpy()

    def draw(self, values: Tensor, row: Row) -> int:
        """Draw a token from logits [width], ignoring top-k."""
        sampling, weights = row.sampling, self._weights[: self.width]
        weights.copy_(values)  # then the largest weight is about 1
        best = weights.amax()
        if sampling.temperature >= _MIN_SCALED:
            torch.add(best / -sampling.temperature, weights, alpha=1 / sampling.temperature, out=weights)
        else:  # subtract the best first, so that a tiny temperature cannot make two infinities
            weights.sub_(best).div_(max(sampling.temperature, _MIN_TEMPERATURE))
        weights.exp_()
        total = self._sum()
        if not math.isfinite(total):  # all tokens are forbidden, or the logits are NaN
            return int(values.argmax())
        if sampling.min_p:
            least = np.float32(sampling.min_p) * self._weights_np.max()
            total = self._drop(float(np.nextafter(least, np.float32(0))))
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
        """Drop weights up to a limit, and return the sum of the rest."""
        F.threshold(self._weights, limit, 0.0, inplace=True)
        return self._sum()

    def _sum(self) -> float:
        torch.sum(self._runs, dim=-1, out=self._sums)
        return float(self._sums_np.sum(dtype=np.float64))

    def _invert(self, uniform: float) -> int:
        """Return the token at which the cumulative weight reaches this fraction of the total, by its run first."""
        ends = self._sums_np.cumsum(dtype=np.float64)
        target = uniform * ends[-1]
        run = min(int(ends.searchsorted(target, side="right")), len(ends) - 1)
        if run:
            target -= ends[run - 1]
        within = self._weights_np[run * _SUM_RUN : (run + 1) * _SUM_RUN].cumsum(dtype=np.float64)
        # rounding may make the sum smaller than the total: stop at the last token with a weight
        target = min(target, within[-1] * (1 - 1e-12))
        return run * _SUM_RUN + int(within.searchsorted(target, side="right"))


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of each row, [rows, count], in descending order, and their indices.

    Only runs with the largest maxima are searched.
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
    """Counters and limits of :class:`device.base.Draw`, kept on the device while the rows stay the same."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._positions = np.zeros(0, np.int64)
        self._numbers: tuple[Tensor, Tensor]

    def of(self, rows: list[Row], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return counters and limits for the rows' next tokens, valid until the next call."""
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


class LogprobsReadback:
    """Log-probabilities of tokens and the likeliest alternatives, in pieces of rows, on their way to the host."""

    def __init__(self, pieces: AbstractSequence[tuple[Tensor, Tensor]]) -> None:
        values, indices = zip(*pieces, strict=True)
        self._values, self._indices = Readback(torch.cat(values)), Readback(torch.cat(indices))

    def wait(self, num_top: Iterable[int]) -> list[TokenLogprob]:
        """Wait for the rows and return each with ``num_top`` alternatives."""
        rows = zip(num_top, self._values.wait().tolist(), self._indices.wait().tolist(), strict=True)
        return [
            TokenLogprob(logprob=logprob, top=list(zip(top, top_logprobs, strict=True))[:count])
            for count, (logprob, *top_logprobs), top in rows
        ]


class Sampling:
    """Tokens [rows] chosen by the device, and their log-probabilities, on their way to the host.

    Log-probabilities are taken before temperature and penalties, as OpenAI and vLLM report them.

    Args:
        forbidden: some row numbers, and a mask of the rows that get ALL_FORBIDDEN.
        num_top: requested number of likeliest tokens with log-probabilities, by row.
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
            self._logprobs = LogprobsReadback([log_probabilities(some, tokens[rows], max(num_top.values()))])
        self._readback = Readback(marked)

    def read(self) -> list[SampledToken]:
        """Wait for the tokens; call once. Raises FloatingPointError if one is not chosen yet."""
        ids = self._readback.wait().tolist()
        if min(ids) < ALL_FORBIDDEN:
            raise FloatingPointError("tokens were read before the device had chosen them: an event is missing")
        sampled = [SampledToken(token_id) for token_id in ids]
        if self._num_top:
            details = self._logprobs.wait(self._num_top.values())
            for row, detail in zip(self._num_top, details, strict=True):
                sampled[row] = SampledToken(ids[row], detail)
        return sampled


class Sampler:
    """Chooses one token for each row of logits, and caches state for the next step. Not thread-safe."""

    def __init__(self, ops: AttentionOps, eos_token_ids: frozenset[int]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._penalties = Penalties()
        self._numbers = DrawNumbers()
        self._scores = torch.empty(0, 0)
        self._drawers: dict[int, RowDrawer] = {}  # by width
        self._ends: Tensor | None = None  # the model's own end tokens
        self._rows: AbstractSequence[Row] = ()
        self._asking: list[int] = []  # rows that may need more than greedy sampling
        self._bound: set[int] = set()  # rows that may have constraints
        self._num_top: dict[int, int] = {}

    def sample(self, logits: Tensor, rows: AbstractSequence[Row]) -> Sampling:
        """Choose tokens from ``logits`` [len(rows), vocab] without waiting for the device.

        ``rows`` are immutable and may be passed again. The maximum is taken in the logits' dtype; all other
        computation is in float32.
        """
        if rows is not self._rows:  # a step often has the same rows as the previous one
            self._rows = rows
            self._bound = {i for i, row in enumerate(rows) if row.sampling.min_tokens > 0 or _is_constrained(row)}
            self._asking = [i for i, row in enumerate(rows) if i in self._bound or not row.sampling.greedy]
            self._num_top = {i: n for i, row in enumerate(rows) if (n := row.sampling.logprobs) is not None}
        plain: list[int] = []  # rows drawn from unmodified logits
        changed: list[int] = []
        for i in self._asking:
            # aborted sequences have lost their rules, and maybe tokens that the rules need
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
        """Draw a token from logits [vocab] on a CPU."""
        count = min(row.sampling.top_k, len(values)) or len(values)
        drawer = self._drawers.get(count)
        if drawer is None:
            drawer = self._drawers[count] = RowDrawer(count)
        if count == len(values):
            return drawer.draw(values, row)
        best, tokens = largest(values.unsqueeze(0), count)
        return int(tokens[0, drawer.draw(best[0], row)])

    def _constrained(self, logits: Tensor, rows: AbstractSequence[Row], which: list[int]) -> Tensor:
        """Return float32 rows [len(which), vocab] after penalties, min_tokens and the requests' restrictions."""
        some = logits if len(which) == len(logits) else logits[on_device(which, logits.device)]
        if logits.device.type != "cpu":
            scores = some.to(torch.float32, copy=True)
        else:  # in a reused buffer
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
    """Return whether penalties or restrictions change a row's scores, which may depend on its newest tokens."""
    sampling, sequence = row.sampling, row.sequence
    is_restricted = sampling.has_token_lists or sequence.constraint is not None
    return is_restricted or sampling.penalised or len(sequence.output_ids) < sampling.min_tokens


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of one token per row, then of the likeliest ones, best first.

    Returns:
        Log-probabilities [rows, 1 + num_top] in float32, and the likeliest tokens [rows, num_top].
    """
    scores = logits.float()
    chosen = scores.gather(1, tokens.unsqueeze(1))
    best, indices = largest(scores, min(num_top, scores.shape[1]))
    return torch.cat([chosen, best], dim=1) - scores.logsumexp(dim=-1, keepdim=True), indices


class Penalties:
    """Repetition penalty over prompt and output, presence and frequency over output; tokens are counted once."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def apply(self, scores: Tensor, rows: AbstractSequence[Row]) -> None:
        """Penalise the contiguous scores [rows, width] in place, for rows with penalties."""
        parts: list[tuple[npt.NDArray[Any], ...]] = []  # tokens, their penalties, repetition
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
    """The distinct tokens of a sequence and their penalties, by place."""

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
        """Count the new tokens."""
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


#: Rows of logits in memory at once: 78 MB in float32 for a vocabulary of 152,000.
_PIECE = 128


class PromptLogprobs:
    """Log-probabilities of prompt tokens in one step (:class:`epd_serve.models.language.MoreLogits`)."""

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
        self._readback = LogprobsReadback(self._taken)

    def hand_out(self) -> None:
        """Wait for the log-probabilities and store them in their sequences."""
        num_top = [sequence.sampling.logprobs or 0 for sequence, _ in self._inputs.scored]
        details = self._readback.wait(num_top)
        for (sequence, index), detail in zip(self._inputs.scored, details, strict=True):
            sequence.logprobs[index] = detail
