"""``epd-serve cost``: command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from device.datasheets import spec_of
from epd_serve.cost.economics import (
    Latency,
    cost_figures,
    estimate_latency,
    price_of,
    read_prices,
    show_cost,
)
from epd_serve.plan.pools import planned_shape


def cost(
    model: Annotated[str, typer.Argument(help="'demo', a directory, config.json, or name: qwen2.5-vl-7b ...")],
    encoder: Annotated[str, typer.Option(help="Device that encodes.")] = "rtx-4090",
    language: Annotated[str, typer.Option(help="Device that prefills and decodes.")] = "a100",
    prices: Annotated[Path | None, typer.Option(help="YAML of 'device: price'.")] = None,
    link: Annotated[str, typer.Option(help="Bandwidth between them, in bytes per second.")] = "25GB/s",
    vision_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's images.")] = 576,
    text_tokens: Annotated[int, typer.Option(min=0, help="Tokens of its text.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of its answer.")] = 128,
    vision_s: Annotated[float | None, typer.Option(min=1e-9, help="Measured seconds of encoding.")] = None,
    language_s: Annotated[float | None, typer.Option(min=1e-9, help="Measured seconds of the rest.")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second to plan for.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare KV and feature bytes over a link, and the savings of cheaper encoders (HeteroServe, section 4).

    Without measured times, equation 5 uses data sheets.
    """
    if (vision_s is None) != (language_s is None):
        raise ValueError("--vision-s and --language-s belong together: their ratio is what decides")
    try:
        bandwidth = TypeAdapter(ByteSize).validate_python(link.removesuffix("/s"))
    except ValidationError as error:
        raise ValueError(f"--link {link}: write bytes per second, as in 25GB/s") from error
    shape = planned_shape(model)
    latency = estimate_latency(
        shape,
        vision_tokens=vision_tokens,
        text_tokens=text_tokens,
        output_tokens=output_tokens,
        encoder=spec_of(encoder),
        language=spec_of(language),
        link_bytes_per_s=bandwidth,
    )
    if vision_s is not None and language_s is not None:
        latency = Latency(vision_s=vision_s, transfer_s=latency.transfer_s, prefill_s=0.0, decode_s=language_s)
    table = read_prices(prices)
    figures = cost_figures(
        shape,
        latency,
        vision_tokens=vision_tokens,
        text_tokens=text_tokens,
        encoder_price=price_of(encoder, table),
        language_price=price_of(language, table),
        bandwidth=bandwidth,
        rate=rate,
    )
    figures["times"] = "measured" if vision_s is not None else "analytic, from data sheets"
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        show_cost(figures, Console(), encoder, language)
