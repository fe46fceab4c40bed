"""Least squares without negative coefficients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.cost.least_squares import fit, fit_relative


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_a_fit_finds_what_made_the_values(parts: list[float]) -> None:
    rows = [[1.0, 2.0, 0.0], [3.0, 1.0, 5.0], [2.0, 2.0, 2.0], [7.0, 0.0, 1.0]]
    values = [sum(part * one for part, one in zip(parts, row, strict=True)) for row in rows]
    assert fit(rows, values) == pytest.approx(parts, abs=1e-6)
    assert min(fit(rows, [-one for one in values])) >= 0


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=4, max_size=12),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    st.lists(st.floats(0.5, 2), min_size=12, max_size=12),
)
def test_nothing_without_negative_parts_fits_better_nearby(
    table: list[list[float]], parts: list[float], errors: list[float]
) -> None:
    rows = [[1.0, *row] for row in table]
    seconds = [
        (1 + sum(map(float.__mul__, parts, row))) * error for row, error in zip(table, errors, strict=False)
    ]
    relative = torch.tensor(rows, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]

    def misfit(found: list[float]) -> float:
        return float(((relative @ torch.tensor(found, dtype=torch.float64)) - 1).square().sum())

    found = fit_relative(rows, seconds)
    assert min(found) >= 0
    best = torch.linalg.lstsq(relative, torch.ones(len(rows), 1, dtype=torch.float64), driver="gelsd").solution
    if best.min() >= 0 and torch.linalg.cond(relative) < 1e6:  # else there is more than one best
        assert misfit(found) <= misfit(best[:, 0].tolist()) + 1e-6
    for number, part in enumerate(found):
        if part:
            for factor in (0.99, 1.01):
                assert misfit(found) <= misfit([*found[:number], factor * part, *found[number + 1 :]]) + 1e-9
