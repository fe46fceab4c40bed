"""The kernel that draws tokens without sorting: the draws of a CPU, and no token that the limits forbid."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="not run: Triton is not installed")

from device.ops import triton_sample  # noqa: E402
from epd_serve.engine.sampling.sampler import DrawNumbers, Row, RowDrawer  # noqa: E402
from epd_serve.sched.sequence import Sequence  # noqa: E402
from epd_serve.types import SamplingParams  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def row(index: int = 0, position: int = 0, **sampling: Any) -> Row:
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    sequence = Sequence(
        request_id="r", prompt_ids=[1], sampling=params, max_tokens=99, positions=None, output_ids=[0] * position
    )
    return Row(sequence, index)


def drawn(scores: Tensor, rows: list[Row]) -> list[int]:
    tokens: list[int] = triton_sample.draw(scores.to(DEVICE), *DrawNumbers().of(rows, DEVICE)).tolist()
    return tokens


@settings(max_examples=6 if not HAS_GPU else 200, deadline=None)
@given(
    noise=st.integers(0, 999),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 9),
    width=st.sampled_from([50, 4096, 5000, 20000]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    params=st.fixed_dictionaries(
        {"temperature": st.sampled_from([1e-4, 0.5, 1.7])},
        optional={"top_p": st.floats(0.001, 0.999), "min_p": st.floats(0.0, 1.0)},
    ),
)
def test_draws_are_those_of_a_cpu(
    noise: int, seed: int, position: int, width: int, spread: float, params: dict[str, Any]
) -> None:
    scores = torch.randn(1, width, generator=torch.Generator().manual_seed(noise)) * spread
    one = row(index=noise % 4, position=position, seed=seed, **params)
    assert drawn(scores, [one]) == [RowDrawer(width).draw(scores[0], one)]


@settings(max_examples=6 if not HAS_GPU else 200, deadline=None)
@given(
    noise=st.integers(0, 999),
    width=st.sampled_from([50, 5000]),
    top_k=st.integers(1, 60),
    values=st.sampled_from([3, 50, 10**6]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.3]),
)
def test_no_token_beyond_the_kth_is_drawn(
    noise: int, width: int, top_k: int, values: int, top_p: float, min_p: float
) -> None:
    """With many equals, -0.0 among them: those at the front count as larger. Also with more than the blocks."""
    generator = torch.Generator().manual_seed(noise)
    scores = torch.randint(-values // 2, values, (1, width), generator=generator).float() * (-2.0 / values)
    kept = scores[0].sort(descending=True, stable=True).indices[:top_k]
    masked = torch.full_like(scores[0], float("-inf"))
    masked[kept] = scores[0, kept]
    limits = {"top_p": top_p, "min_p": min_p}
    rows = [row(seed=noise + i, top_k=top_k, **limits) for i in range(4)]
    found = drawn(scores.expand(4, -1).contiguous(), rows)
    assert found == [RowDrawer(width).draw(masked, row(seed=noise + i, **limits)) for i in range(4)]


def test_rows_without_a_choice() -> None:
    scores = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    scores[0] = float("-inf")
    scores[1, 4500] = float("nan")
    scores[2] = float("-inf")
    scores[2, 4321] = -3.0
    rows = [row(seed=i, top_k=7, top_p=0.9) for i in range(4)]
    found = drawn(scores, rows)
    assert found[:3] == [0, 4500, 4321]
    assert found[3] in scores[3].topk(7).indices
