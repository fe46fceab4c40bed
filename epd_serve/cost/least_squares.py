"""Non-negative least squares, for the costs of steps, encodes, transfers and requests."""

from __future__ import annotations

from collections.abc import Sequence

#: A column whose remainder, orthogonal to the others, is below this share counts as dependent.
_DEPENDENT = 1e-9


def fit_relative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients of :func:`fit` that minimise the relative errors; all ``values`` are positive."""
    return fit(
        [[part / total for part in row] for row, total in zip(rows, values, strict=True)], [1.0] * len(rows)
    )


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return non-negative coefficients of the columns of ``rows`` that fit ``values``.

    Drops the column with the most negative coefficient until none is negative, which is not always the best fit.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    scales = [max(map(abs, column)) for column in columns]
    kept = [number for number, scale in enumerate(scales) if scale]
    while True:
        found = _least_squares([[value / scales[number] for value in columns[number]] for number in kept], values)
        if not found or min(found) >= 0:
            break
        del kept[found.index(min(found))]
    parts = [0.0] * len(columns)
    for number, value in zip(kept, found, strict=True):
        parts[number] = value / scales[number]
    return parts


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve by modified Gram-Schmidt; a column that depends on earlier ones gets coefficient 0."""
    rest = list(values)
    bases: list[list[float]] = []
    upper: list[list[float]] = []  # for each column its parts along the bases, its own last
    along: list[float] = []
    for column in columns:
        left, parts = list(column), []
        for base in bases:
            part = _dot(base, left)
            left = [a - part * b for a, b in zip(left, base, strict=True)]
            parts.append(part)
        norm = _dot(left, left) ** 0.5
        if norm <= _DEPENDENT * _dot(column, column) ** 0.5:
            norm, left = 0.0, [0.0] * len(left)
        base = [value / norm for value in left] if norm else left
        part = _dot(base, rest)
        rest = [a - part * b for a, b in zip(rest, base, strict=True)]
        bases.append(base)
        upper.append([*parts, norm])
        along.append(part)
    found = [0.0] * len(columns)
    for number in reversed(range(len(columns))):
        if upper[number][-1]:
            later = sum(upper[other][number] * found[other] for other in range(number + 1, len(columns)))
            found[number] = (along[number] - later) / upper[number][-1]
    return found


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
