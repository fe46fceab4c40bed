"""Work and costs of instances, estimated from their reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from epd_serve.cost.stages import (
    MAX_BATCH_PIXELS,
    MAX_BATCH_TOKENS,
    PRIOR_DECODE,
    PRIOR_ENCODE,
    PRIOR_OUTPUT_TOKENS,
    PRIOR_PREFILL,
    StageCosts,
    Work,
)
from epd_serve.protocol.wire import Load
from epd_serve.types import Stage, StageRate

#: Of languages in Latin letters, about, where no prompt was seen yet.
PRIOR_TOKENS_PER_CHARACTER = 0.25
#: Of patches of 28 pixels square.
PRIOR_TOKENS_PER_PIXEL = 1 / 784

#: Pixels, tokens and sequences of a batch by which rates are compared.
_TYPICAL_SIZES = {Stage.ENCODE: 448.0**2, Stage.PREFILL: 256.0, Stage.DECODE: 8.0}
#: Rates that differ by no more than this factor are about the same.
_LIKE = 2.0

_PRIORS = {Stage.ENCODE: PRIOR_ENCODE, Stage.PREFILL: PRIOR_PREFILL, Stage.DECODE: PRIOR_DECODE}


def work_of(load: Load) -> Work:
    """The work in an instance's report. KV that is held or reserved is not in ``free_blocks`` any more."""
    return Work(
        num_pixels=load.num_waiting_pixels,
        num_tokens=load.num_waiting_tokens,
        num_sequences=load.num_running + load.num_waiting + load.num_expected,
    )


def resolve_costs(load: Load, budgets: Mapping[str, float], peers: Sequence[Load]) -> StageCosts:
    """An instance's costs: as it and its peers of one role measured them lately, else as it once did.

    Instances whose times differ by less than measurements do are taken for equal; one that is new or was idle, for
    one like the others. So it is tried again: one that was slow in an unlucky moment is not avoided for ever.
    """

    def rate(stage: Stage) -> StageRate:
        name = stage.value
        own = load.rates.get(name)
        known = [one.rates[name] for one in (load, *peers) if name in one.rates]
        if own is not None and own.is_fresh and known.count(own) == len(known):
            return own
        fresh = [one for one in known if one.is_fresh]
        if not known:
            return _PRIORS[stage]
        if own is not None and not fresh:
            return own
        size = _TYPICAL_SIZES[stage]
        middle = sorted(fresh or known, key=lambda one: one.seconds(size))[(len(fresh or known) - 1) // 2]
        if own is None or not own.is_fresh:
            return StageRate(middle.base_s, middle.unit_s, is_fresh=False)
        own_s, middle_s = own.seconds(size), middle.seconds(size)
        is_like = own_s < _LIKE * middle_s and middle_s < _LIKE * own_s
        return middle if is_like else own

    return StageCosts(
        encode=rate(Stage.ENCODE),
        prefill=rate(Stage.PREFILL),
        decode=rate(Stage.DECODE),
        max_batch_pixels=budgets.get("image_budget_pixels") or MAX_BATCH_PIXELS,
        max_batch_tokens=budgets.get("max_num_batched_tokens") or MAX_BATCH_TOKENS,
        mean_output_tokens=_mean_output_tokens([load, *peers]),
    )


def tokens_per_character(loads: Iterable[Load]) -> float:
    """The ratio in the prompts that instances saw lately: the median of three or more, else the mean."""
    known = sorted([load.tokens_per_character for load in loads if load.tokens_per_character])
    if len(known) < 3:  # as it mostly is; median() takes its time
        return sum(known) / len(known) if known else PRIOR_TOKENS_PER_CHARACTER
    return median(known)


def _mean_output_tokens(loads: Sequence[Load]) -> float:
    """The median over all instances.

    An instance that has seen few answers end would be avoided, or get all requests, for the lengths of these
    alone.
    """
    known = [load.mean_output_tokens for load in loads if load.mean_output_tokens]
    return median(known) if known else PRIOR_OUTPUT_TOKENS
