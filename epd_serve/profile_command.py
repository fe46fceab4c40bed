"""``epd-serve profile``: what is typed and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from epd_serve.errors import needs_native


def profile(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    model: Annotated[str, typer.Option(help="'demo' or a transformers model directory.")] = "demo",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, npu:0 ...")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Number format.")] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    clock: Annotated[
        Literal["wall", "cpu"], typer.Option(help="cpu: CPU time, for a machine that others use too.")
    ] = "wall",
    deployments: Annotated[
        bool,
        typer.Option(help="Bring up EPD and E-P-D too, for what requests take besides their stages."),
    ] = True,
    mooncake: Annotated[
        bool, typer.Option("--mooncake", help="Measure stages that talk over Mooncake too, by TCP.")
    ] = False,
) -> None:
    """Measure encode, prefill, decode and transfers on a device and fit the costs that 'epd-serve plan' uses."""
    with needs_native():
        import torch

        from epd_serve.profiling.contention import stages_beside
        from epd_serve.profiling.device_profile import GridOptions, profile_device
    from rich.console import Console
    from rich.table import Table

    from epd_serve.config.schema import model_path
    from epd_serve.profiling.overheads import OverheadOptions, with_overheads

    options = GridOptions(
        model=model_path(model),
        model_name=model if model == "demo" else Path(model).resolve().name,
        device=device,
        dtype=getattr(torch, dtype),
        threads=threads,
        clock=clock,
        mooncake=mooncake,
    )
    with Console(stderr=True).status("measuring") as status:
        result = profile_device(options, lambda text: status.update(f"measuring {text}"))
        if deployments:
            pairs = stages_beside(options, lambda text: status.update(f"measuring {text}"))
            result = msgspec.structs.replace(result, interference_within=pairs)
            overheads = OverheadOptions(
                model=model, device=device, dtype=dtype, threads=threads, mooncake=mooncake
            )
            result = with_overheads(result, overheads, lambda text: status.update(f"measuring {text}"))
    out.write_bytes(result.to_json())
    table = Table(
        "stage", "samples", "median error", "90 %", "worst", title=f"{result.model} on {result.description}"
    )
    for stage, residual in result.residuals.items():
        errors = (f"{value:.0%}" for value in (residual.median, residual.p90, residual.worst))
        table.add_row(stage, str(residual.num_samples), *errors)
    Console().print(table)
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
        Console().print(rest)
    if result.interference_within:
        beside = Table("stage", "takes longer beside", "in another process", "in the same one")
        for pair in sorted({*result.interference, *result.interference_within}):
            known = (pairs.get(pair) for pairs in (result.interference, result.interference_within))
            beside.add_row(*pair.split("/"), *("-" if more is None else f"{more:.0%}" for more in known))
        Console().print(beside)
