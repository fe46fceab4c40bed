"""The tables of ``epd-serve profile``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from epd_serve.cost.profile import Profile


def show_profile(result: Profile, console: Console) -> None:
    """Show how well the fits agree with the measurements, and what requests take besides their stages."""
    table = Table(
        "stage", "samples", "median error", "90 %", "worst", title=f"{result.model} on {result.description}"
    )
    for stage, residual in result.residuals.items():
        errors = (f"{value:.0%}" for value in (residual.median, residual.p90, residual.worst))
        table.add_row(stage, str(residual.num_samples), *errors)
    console.print(table)
    besides = {
        "request": result.request_s,
        "image": result.image_s,
        "megapixel": 1e6 * result.image_pixel_s,
        "KV elsewhere": result.split_s,
        "1000 tokens' KV": 1e3 * result.split_token_s,
        "feature from elsewhere": result.feature_s,
        "hand-over to decode": result.hand_over_s,
        "sequence of a step": result.stream_s,
    }
    if any(besides.values()):
        rest = Table("besides the stages, for each", "ms")
        for name, seconds in besides.items():
            rest.add_row(name, f"{1e3 * seconds:.2f}")
        console.print(rest)
    if result.interference_within:
        beside = Table("stage", "takes longer beside", "in another process", "in the same one")
        for pair in sorted({*result.interference, *result.interference_within}):
            known = (pairs.get(pair) for pairs in (result.interference, result.interference_within))
            beside.add_row(*pair.split("/"), *("-" if more is None else f"{more:.0%}" for more in known))
        console.print(beside)
