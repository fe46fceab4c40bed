"""Measurements of stages: the costs that fit them, how well they do, and what is said of a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from epd_serve.cost.least_squares import fit_relative
from epd_serve.cost.profile import DecodeLine, EncodeLine, Profile, Residual

#: A fit that misses half of its measurements by so much is not to be trusted.
POOR = 0.15

#: A stage, its work, its seconds. The work of a step is that of :meth:`Profile.step_s`; of an encode the number of
#: images and the pixels of each; of a transfer its bytes.
Sample = tuple[str, list[float], float]


def decode_lines(samples: Sequence[Sample]) -> tuple[DecodeLine, ...]:
    """A line for each size of decode steps, fitted by itself; ``samples`` are of steps of decodes alone."""
    by_size: dict[int, list[Sample]] = {}
    for one in samples:
        by_size.setdefault(int(one[1][1]), []).append(one)
    lines: list[DecodeLine] = []
    for size, some in sorted(by_size.items()):
        base_s, context_s = fit_relative([[1.0, work[2]] for _, work, _ in some], [one[2] for one in some])
        lines.append(DecodeLine(num_sequences=size, base_s=base_s, context_s=context_s))
    return tuple(lines)


def encode_line(samples: Sequence[Sample]) -> EncodeLine:
    base_s, image_s, pixel_s, pair_s = fit_relative(
        [[1.0, count, count * pixels, count * pixels**2] for _, (count, pixels), _ in samples],
        [seconds for *_, seconds in samples],
    )
    return EncodeLine(base_s=base_s, image_s=image_s, pixel_s=pixel_s, pair_s=pair_s)


def encode_s(profile: Profile, work: Sequence[float]) -> float:
    count, pixels = work
    return profile.encode_s([int(pixels)] * int(count))


def residual(samples: Sequence[Sample], predict: Callable[[list[float]], float]) -> Residual:
    errors = sorted(abs(predict(work) / seconds - 1) for _, work, seconds in samples)
    return Residual(
        num_samples=len(errors),
        median=errors[len(errors) // 2],
        p90=errors[int(0.9 * (len(errors) - 1))],
        worst=errors[-1],
    )


def advice(result: Profile, model: str, out: Path) -> list[str]:
    """Sentences below a profile that lies in ``out``: how far it can be trusted, and how to plan with it."""
    said = [f"Wrote {out}."]
    poor = [f"{stage} by {one.median:.0%}" for stage, one in result.residuals.items() if one.median > POOR]
    if poor:
        said.append(
            f"The fit misses half of the measurements of {', '.join(poor)} or more: something else ran on the "
            "machine, or the device changed its speed. Measure again while it is quiet."
        )
    pool = f"{{device: {result.device}, count: 1, profile: {out.resolve()}}}"
    said.append(
        f"To plan with it, write into devices.yaml 'model: {model}' and, below 'pools:', '- {pool}' with the "
        f"number of your devices{_a_cpu(result)}. Then: "
        "epd-serve plan --workload sharegpt4o-like --rate 2 --devices devices.yaml"
    )
    return said


def _a_cpu(result: Profile) -> str:
    threads = f"{result.threads} threads" if result.threads > 1 else "one thread"
    return (
        f" (of a CPU: how many instances of {threads} have cores of their own)" if result.device == "cpu" else ""
    )


def show_profile(result: Profile, console: Console) -> None:
    """Show how well the fits agree with the measurements."""
    table = Table(
        "stage", "samples", "median error", "90 %", "worst", title=f"{result.model} on {result.description}"
    )
    for stage, residual in result.residuals.items():
        errors = (f"{value:.0%}" for value in (residual.median, residual.p90, residual.worst))
        table.add_row(stage, str(residual.num_samples), *errors)
    console.print(table)
