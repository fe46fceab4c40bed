"""``epd-serve profile``: command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from epd_serve.cli.flags import writable
from epd_serve.config import model_path
from epd_serve.errors import needs_native


def profile(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.", callback=writable)],
    model: Annotated[str, typer.Option(help="'demo', a model's directory, or its name on the hub.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, npu:0 ...")] = "cpu",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Number format, as in a deployment.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    clock: Annotated[Literal["wall", "cpu"], typer.Option(help="cpu: CPU time, for a shared machine.")] = "wall",
    endpoint: Annotated[
        str, typer.Option(help="Measure a running vLLM server over HTTP, as in http://127.0.0.1:8000.")
    ] = "",
) -> None:
    """Measure encode, prefill, decode and transfers on a device, and fit the costs for 'epd-serve plan'."""
    if not model:
        raise ValueError(
            "--model is missing: give the directory or hub name of the model to plan for, "
            "as in --model Qwen/Qwen2.5-VL-3B-Instruct, or --model demo for the built-in one"
        )
    if endpoint and (threads is not None or clock != "wall" or dtype != "auto"):
        raise ValueError("--endpoint measures a running server: remove --dtype, --threads and --clock")
    from rich.console import Console

    from epd_serve.profiling.fits import advice, show_profile

    with Console(stderr=True).status("measuring") as status:

        def progress(text: str) -> None:
            status.update(f"measuring {text}")

        if endpoint:
            from epd_serve.profiling.endpoint import profile_endpoint

            result = profile_endpoint(endpoint.rstrip("/"), model, device, progress)
        else:
            with needs_native():
                from device.registry import get_device
                from epd_serve.engine.kv_memory import resolve_dtype
                from epd_serve.models.loader import load_family
                from epd_serve.profiling.device_profile import GridOptions, profile_device
            path = model_path(model)
            options = GridOptions(
                model=path,
                model_name=model if model == "demo" else Path(model).resolve().name,
                device=device,
                dtype=resolve_dtype(dtype, load_family(path).config, get_device(device)),
                threads=threads,
                clock=clock,
            )
            result = profile_device(options, progress)
    out.write_bytes(result.to_json())
    console = Console()
    show_profile(result, console)
    for sentence in advice(result, model, out):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
