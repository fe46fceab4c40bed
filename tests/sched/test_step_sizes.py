"""Sizes of steps: what is timed for them, the cost that is fitted to the times, and the budgets that follow."""

import pytest

from epd_serve.cost.profile import DecodeLine, Line, Profile
from epd_serve.sched.step_cost import StepCost, StepWork
from epd_serve.sched.step_sizes import Limits, StepShape, fit_cost, size_steps
from epd_serve.sim.spec import Batching, SimInstanceSpec, size_steps_of
from epd_serve.types import Role


def test_the_fit_finds_the_cost_behind_the_times():
    cost = StepCost(base_s=0.01, token_s=1e-4, sequence_s=5e-4, context_s=1e-6, pair_s=2e-8)
    works = [
        StepWork.of([context] * decodes, chunks)
        for decodes, context in ((0, 1), (4, 16), (8, 512))
        for chunks in ((), ((0, 64),), ((512, 128),), ((0, 16),) * 4)
        if decodes or chunks
    ]
    fitted = fit_cost({work: cost.step_s(work) for work in works})
    assert all(fitted.step_s(work) == pytest.approx(cost.step_s(work), rel=1e-3) for work in works)
    assert fitted.token_s == pytest.approx(cost.token_s, rel=0.05)


def test_no_part_of_a_fitted_cost_is_negative():
    falling = {StepWork.of([], [(0, count)]): 1.0 / count for count in (16, 32, 64, 128)}
    fitted = fit_cost(falling)
    assert min(fitted.base_s, fitted.token_s, fitted.sequence_s, fitted.context_s, fitted.pair_s) >= 0
    assert fit_cost({StepWork.of([], [(0, 16)]): 0.5}).step_s(StepWork.of([], [(0, 16)])) == pytest.approx(0.5)


SLOW = Profile(
    kind="measured",
    device="cpu",
    model="m",
    step=(Line(base_s=10e-3, token_s=3e-4, sequence_s=7e-4),),
    decode=tuple(DecodeLine(num_sequences=n, base_s=5e-3 + 6e-4 * n, context_s=0.0) for n in (1, 8, 32)),
    encode=(),
)


def spec(role, **fields):
    return SimInstanceSpec(name="d0", role=Role.parse(role), profile=SLOW, device="cpu", num_blocks=4096, **fields)


def test_a_simulated_instance_sizes_its_steps_as_one_that_took_these_times():
    simulated = spec("PD", batching=Batching(tpot_s=0.023))
    memory = {"num_blocks": 4096, "block_size": 16, "max_model_len": 32768}
    limits = Limits(latency_s=0.023, decodes=True, max_num_tokens=2048, max_num_seqs=64, **memory)
    timed = []

    def seconds(shape):
        timed.append(shape)
        work = shape.work
        return SLOW.step_s(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)

    sizes = size_steps(seconds, limits)
    budget, cost = size_steps_of(simulated)
    assert cost == sizes.cost == budget.pace.cost
    assert (budget.max_num_seqs, budget.max_num_tokens) == (26, 32), "5 + 0.6 n and 10 + 0.7 + 0.3 n ms"
    assert {shape.num_decodes for shape in timed} >= {1, 2, 4, 8, 16, 26} and any(shape.chunks for shape in timed)
    budget.pace.observe(StepWork.of([16] * 4, [(0, 64)]), 1.0)
    assert size_steps_of(simulated)[0].pace.correction == 1, "what one has learnt is not another's"


def test_without_a_limit_only_an_order_asks_for_the_cost():
    budget, cost = size_steps_of(spec("D"))
    assert (budget.pace, budget.max_num_seqs, cost) == (None, 64, StepCost())


def test_a_shape_is_named_and_counted_by_its_contexts():
    shape = StepShape(num_decodes=4, context=256, spread=0.5, chunks=((0, 64),))
    assert shape.contexts == [352, 288, 224, 160]
    assert str(shape) == "4x256~0.5 0+64"
    assert shape.num_blocks(16) == 22 + 18 + 14 + 10 + 4
    assert shape.work.decode_context == 1024 and shape.work.num_tokens == 4 + 64
