"""Fit costs to measurements, judge the fit, and explain a profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from epd_serve.cost.least_squares import fit_relative
from epd_serve.cost.profile import DecodeLine, EncodeLine, Profile, Residual

#: A fit with a larger median error is unreliable.
POOR = 0.15

#: A stage, its work, its seconds. Work is the arguments of :meth:`Profile.step_s` for a step, the number of images
#: and the pixels of each for an encode, bytes for a transfer.
Sample = tuple[str, list[float], float]


def decode_lines(samples: Sequence[Sample]) -> tuple[DecodeLine, ...]:
    """Fit a line for each number of decodes, from steps of decodes alone."""
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


def with_residuals(profile: Profile) -> Profile:
    """Return a profile with the errors of its fits to its samples."""
    residuals: dict[str, Residual] = {}
    for stage in dict.fromkeys(stage for stage, *_ in profile.samples):
        errors: list[float] = []
        for _, work, seconds in (one for one in profile.samples if one[0] == stage):
            if stage == "encode":
                predicted_s = profile.encode_s([int(work[1])] * int(work[0]))
            elif stage == "transfer":
                predicted_s = profile.handshake_s + work[0] / profile.link_bytes_per_s
            else:
                predicted_s = profile.step_s(*work)
            errors.append(abs(predicted_s / seconds - 1))
        errors.sort()
        residuals[stage] = Residual(
            num_samples=len(errors),
            median=errors[len(errors) // 2],
            p90=errors[int(0.9 * (len(errors) - 1))],
            worst=errors[-1],
        )
    return msgspec.structs.replace(profile, residuals=residuals)


def advice(result: Profile, model: str, out: Path) -> list[str]:
    """Return sentences on the reliability of the profile in ``out`` and on how to plan with it."""
    sentences = [f"Wrote {out}."]
    poor = [f"{stage} by {one.median:.0%}" for stage, one in result.residuals.items() if one.median > POOR]
    if poor:
        sentences.append(
            f"The fit has a large median error ({', '.join(poor)}): the machine was busy, or the device changed "
            "its speed. Measure again on an idle machine."
        )
    pool = f"{{device: {result.device}, count: 1, profile: {out.resolve()}}}"
    count = "the number of your devices"
    if result.device == "cpu":
        count += f" (for a CPU: of instances with {result.threads} threads that get their own cores)"
    sentences.append(
        f"To plan with it, write 'model: {model}' into devices.yaml and, below 'pools:', '- {pool}' with {count}. "
        "Then: epd-serve plan --workload sharegpt4o-like --rate 2 --devices devices.yaml"
    )
    return sentences


def show_profile(result: Profile, console: Console) -> None:
    """Print the errors of the fits."""
    table = Table(
        "stage", "samples", "median error", "90 %", "worst", title=f"{result.model} on {result.description}"
    )
    for stage, residual in result.residuals.items():
        errors = (f"{value:.0%}" for value in (residual.median, residual.p90, residual.worst))
        table.add_row(stage, str(residual.num_samples), *errors)
    console.print(table)
