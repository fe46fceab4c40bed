"""Greedy is argmax, draws follow the distribution that the parameters leave, no row depends on its batch."""

from typing import Any

import numpy as np
import pytest
import torch
from chip.chip import never_waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from device.registry import get_device
from epd_serve.engine.engine import ALL_FORBIDDEN, NO_TOKEN, SampledToken
from epd_serve.engine.sampling.sampler import DrawNumbers, Row, Sampler, largest
from epd_serve.engine.sampling.sampler import draw as draw_sorted
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

OPS = get_device("cpu").ops
VOCAB = 50


def sequence(output: list[int] | None = None, prompt: list[int] | None = None, **sampling: Any) -> Sequence:
    return Sequence(
        request_id="r",
        prompt_ids=prompt or [1],
        sampling=SamplingParams(**{"seed": 7, **sampling}),
        max_tokens=10,
        positions=None,
        output_ids=output or [],
    )


def sample(logits: torch.Tensor, rows: list[Row], eos: frozenset[int] = frozenset()) -> list[SampledToken]:
    return Sampler(OPS, eos).sample(logits, rows).read()


def draw(logits: torch.Tensor, *sequences: Sequence, eos: frozenset[int] = frozenset()) -> list[int]:
    rows = [Row(s, s.index) for s in sequences]
    return [token.token_id for token in sample(logits.expand(len(rows), -1), rows, eos)]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


class OnlyToken:
    """A grammar that lets one token follow."""

    error = ""

    def __init__(self, token: int) -> None:
        self._mask = np.zeros(-(-VOCAB // 32), np.int32)
        self._mask[token // 32] = 1 << token % 32

    def allowed(self, output_ids: Any) -> Any:
        return self._mask

    def fork(self) -> "OnlyToken":
        return self


def test_the_host_waits_for_no_device_before_it_reads(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    bound = sequence(temperature=0.0)
    bound.constraint = OnlyToken(5)
    greedy = {
        "bias": sequence(temperature=0.0, logit_bias={7: 100.0}),
        "allowed": sequence(temperature=0.0, allowed_token_ids=(3,)),
        "bad word": sequence(temperature=0.0, bad_word_ids=((best,),)),
        "held back": sequence(temperature=0.0, min_tokens=2, stop_token_ids=(best,)),
        "penalties": sequence([best], temperature=0.0, presence_penalty=1.0, repetition_penalty=1.5),
        "grammar": bound,
        "logprobs": sequence(temperature=0.0, logprobs=3),
        "drawn": sequence(temperature=0.7, top_k=3, top_p=0.9),
    }
    rows = [Row(one, 0) for one in greedy.values()]
    expected = sample(logits.expand(len(rows), -1), rows, frozenset({2}))
    device = get_device("chip:0")
    device.activate()
    many = logits.expand(len(rows), -1).contiguous().to(device.torch_device)
    with never_waiting():
        sampling = Sampler(device.ops, frozenset({2})).sample(many, rows)
    assert [one.token_id for one in sampling.read()] == [one.token_id for one in expected]
    assert [expected[place].token_id for place in (0, 1, 5)] == [7, 3, 5]


def test_a_token_depends_on_seed_index_and_position_only(logits: torch.Tensor) -> None:
    def tokens(**kwargs: Any) -> list[int]:
        return [draw(logits, sequence(output=[0] * i, temperature=1.0, **kwargs))[0] for i in range(20)]

    assert tokens() == tokens()
    assert tokens() != tokens(seed=8)
    assert len(set(tokens())) > 3, "positions draw different numbers"


WAYS = pytest.mark.parametrize(
    "way", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3}, {"logprobs": 1}], ids=str
)


@pytest.mark.parametrize("broken", [[-torch.inf] * VOCAB, [torch.inf] + [0.0] * 49])
@WAYS
def test_logits_that_leave_no_token_still_name_one(broken: list[float], way: dict[str, Any]) -> None:
    drawn = sequence(**{"temperature": 1.0, **way})
    [token] = draw(torch.tensor([broken]), drawn)
    assert 0 <= token < VOCAB
    if drawn.sampling.temperature:
        [token] = draw_sorted(torch.tensor([broken]), [Row(drawn, 0)]).tolist()
        assert 0 <= token < VOCAB


@WAYS
def test_a_request_without_a_token_leaves_its_batch_alone(logits: torch.Tensor, way: dict[str, Any]) -> None:
    """Its logits are no numbers, or it forbids all tokens."""
    broken = torch.tensor([[0.0] * (VOCAB - 43) + [torch.nan] * 43])
    banned = {"allowed_token_ids": (3,), "bad_word_ids": ((3,),)}
    one, contradictory = (sequence(**{"temperature": 1.0, **more, **way}) for more in ({}, banned))
    drawn, bound = sequence(temperature=1.0), sequence(temperature=0.0, allowed_token_ids=(3,))
    tokens = draw(torch.cat([broken, logits.expand(3, -1)]), one, contradictory, drawn, bound)
    assert tokens == [NO_TOKEN, ALL_FORBIDDEN, *draw(logits, drawn), 3]


def test_penalties_as_the_apis_define_them() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]])
    assert draw(logits, sequence(prompt=[0], temperature=0.0, repetition_penalty=2.0)) == [1]
    assert draw(logits, sequence(output=[0], temperature=0.0, presence_penalty=1.5)) == [1]
    assert draw(logits, sequence(output=[0, 0, 1], temperature=0.0, frequency_penalty=1.1)) == [2]
    assert draw(logits, sequence(prompt=[0], temperature=0.0, presence_penalty=1.5)) == [0], (
        "prompt does not count"
    )


def test_min_tokens_hold_the_end_back_even_by_tokens_that_the_model_does_not_have() -> None:
    logits = torch.tensor([[9.0, 3.0, 2.0]])
    held_back = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(1, 999_999))
    ended = sequence(output=[1, 1], temperature=0.0, min_tokens=2)
    assert draw(logits, held_back, ended, eos=frozenset({0})) == [2, 0]


def test_logprobs_are_those_of_the_model(logits: torch.Tensor) -> None:
    chosen = sequence(temperature=0.3, logprobs=4)
    token = sample(logits, [Row(chosen, 0)])[0]
    reference = logits[0].log_softmax(-1)
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(float(reference[token.token_id]), abs=1e-5)
    assert [t for t, _ in token.logprob.top] == reference.topk(4).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-10, 1e-38, 1e-46, 1e-300])
def test_the_smallest_temperatures_choose_the_best_token(logits: torch.Tensor, temperature: float) -> None:
    assert draw(logits, sequence(temperature=temperature)) == [int(logits.argmax())]


def test_a_min_p_of_1_leaves_the_best_token() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(3)) * 50
    rows = [Row(sequence(temperature=0.7, min_p=1.0), 0)] * len(logits)
    assert [token.token_id for token in sample(logits, rows)] == logits.argmax(-1).tolist()


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_p": 0.9},  # of a flat distribution: more tokens than are looked at first
    {"temperature": 0.2, "top_p": 0.5, "logprobs": 2},
    {"temperature": 1.0, "top_k": 400, "logprobs": 0},
    {"temperature": 1.0, "top_k": 5, "logprobs": 3},
    {"temperature": 1.0, "frequency_penalty": 1.0, "output": [3, 3, 4]},
]


def test_no_row_depends_on_its_batch_however_it_is_drawn() -> None:
    logits = torch.randn(len(KINDS), 1000, generator=torch.Generator().manual_seed(5))
    for seed in range(20):
        rows = [Row(sequence(seed=seed, **kind), 0) for kind in KINDS]
        together = sample(logits, rows)
        assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
        assert [token.logprob and len(token.logprob.top) for token in together] == [
            kind.get("logprobs") for kind in KINDS
        ]


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 9),
    position=st.integers(0, 9),
    attempt=st.integers(0, 3),
)
def test_random_numbers_are_those_of_philox(seed: int, index: int, position: int, attempt: int) -> None:
    generator = np.random.Philox(key=np.array([seed % 2**64, index], np.uint64), counter=[position, attempt, 0, 0])
    row = Row(sequence(seed=seed, output=[1] * position), index)
    assert row.uniform(attempt) == float((generator.random_raw() >> 11) * 2.0**-53)
    counters, _ = DrawNumbers().of([row], torch.device("cpu"))
    assert counters.tolist() == [[seed, index, position + 1]], "a device draws with the same numbers"


@given(seed=st.integers(0, 99), rows=st.integers(1, 3), runs=st.integers(8, 40), count=st.integers(0, 12))
def test_the_largest_are_in_the_runs_of_the_largest_maxima(seed: int, rows: int, runs: int, count: int) -> None:
    values = torch.randn(rows, 64 * runs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    best, indices = largest(values, count)
    assert torch.equal(best, values.topk(count).values)
    assert torch.equal(values.gather(1, indices), best)
    assert all(len(set(row)) == count for row in indices.tolist())


def left(logits: torch.Tensor, params: dict[str, Any], slack: float = 0.0) -> torch.Tensor:
    """The rest of a distribution by sorting, in vLLM's order, equals together; with slack a little more."""
    values = logits.double() / params["temperature"]
    probabilities = values.softmax(-1)
    values = values.masked_fill(
        probabilities < params.get("min_p", 0.0) * probabilities.max() * (1 - slack), float("-inf")
    )
    if top_k := params.get("top_k"):
        values = values.masked_fill(values < values.topk(top_k).values[-1], float("-inf"))
    probabilities, order = values.softmax(-1).sort(descending=True)
    likelier = torch.tensor([float(probabilities[probabilities > p].sum()) for p in probabilities])
    kept = likelier < params.get("top_p", 1.0) + slack
    kept[0] = True
    return torch.zeros_like(probabilities).index_copy_(0, order, probabilities * kept)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.01, 0.7, 5.0, 60.0]),
    temperature=st.sampled_from([0.05, 0.3, 1.0, 1.7]),
    params=st.fixed_dictionaries(
        {},
        optional={
            "top_p": st.floats(0.001, 0.999),
            "min_p": st.floats(0.0, 1.0),
            "top_k": st.integers(1, 40),
        },
    ),
)
def test_draws_keep_to_what_a_sorted_vocabulary_leaves(
    seed: int, spread: float, temperature: float, params: dict[str, Any]
) -> None:
    """Support and, coarsely, shares: of the likelier half of the mass."""
    vocab, count = 320, 200
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()
    params = {"temperature": temperature, **params}
    allowed, certain = left(logits, params, slack=1e-4), left(logits, params)
    rows = [Row(sequence(seed=1000 * seed + i, **params), 0) for i in range(count)]
    scores = logits.float().expand(count, -1).contiguous()
    ways = {"sorted": draw_sorted(scores, rows)}
    ways["rows"] = torch.tensor([token.token_id for token in sample(logits.expand(count, -1), rows)])
    expected = certain / certain.sum()
    best = expected.sort(descending=True)
    half = best.indices[: int((best.values.cumsum(-1) < 0.5).sum()) + 1]
    exact = float(expected[half].sum())
    deviation = (exact * (1 - exact) / count) ** 0.5
    for name, tokens in ways.items():
        assert bool((allowed[tokens] > 0).all()), name
        if "top_k" not in params:  # which of equals top-k takes is its own affair
            share = float(torch.isin(tokens, half).float().mean())
            assert abs(share - exact) <= 6 * deviation + 2e-3, name


def test_penalties_and_draws_follow_sequences_that_grow_together_and_alone() -> None:
    """As if all of the output was counted anew for each token."""
    generator = torch.Generator().manual_seed(2)
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 0.9, "top_k": 7, "seed": 2**63 - 1},
    ]
    growing = [sequence(prompt=[5, 5, 9], **{"temperature": 0.0, **kind}) for kind in kinds]
    sampler = Sampler(OPS, frozenset())
    for step in range(80):
        some = growing[step % 4 :] if step % 8 in (1, 2) else growing
        rows = [Row(s, 0) for s in some]
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        together = sampler.sample(logits, rows).read()
        assert together == sample(logits, rows)
        for s, token in zip(some, together, strict=True):
            s.output_ids.append(token.token_id)
    assert len(set(growing[1].output_ids)) > 10
