"""``epd-serve cost``: what is typed and what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from epd_serve.config.sizes import parse_rate
from epd_serve.cost import economics as eq
from epd_serve.cost.devices import spec_of
from epd_serve.cost.estimate import RequestSize, estimate_latency
from epd_serve.cost.prices import price_of, read_prices
from epd_serve.cost.shape import ModelShape, shape_of


def cost(
    model: Annotated[str, typer.Argument(help="A model's directory, config.json, or name: llava-1.5-7b ...")],
    encoder: Annotated[str, typer.Option(help="Device that encodes.")] = "rtx-4090",
    language: Annotated[str, typer.Option(help="Device that prefills and decodes.")] = "a100",
    prices: Annotated[Path | None, typer.Option(help="YAML of 'device: price'.")] = None,
    link: Annotated[str, typer.Option(help="Bandwidth between them, in bytes per second.")] = "25GB/s",
    vision_tokens: Annotated[int, typer.Option(min=1, help="Of a request's images.")] = 576,
    text_tokens: Annotated[int, typer.Option(min=0, help="Of its text.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of its answer.")] = 128,
    vision_s: Annotated[float | None, typer.Option(min=1e-9, help="Measured seconds of encoding.")] = None,
    language_s: Annotated[float | None, typer.Option(min=1e-9, help="Measured seconds of the rest.")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second to plan for.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """KV against feature bytes over a link, and what cheaper encoders save (HeteroServe, section 4).

    Without measured seconds those of equation 5 come from data sheets.
    """
    if (vision_s is None) != (language_s is None):
        raise ValueError("--vision-s and --language-s belong together: their ratio is what decides")
    bandwidth = parse_rate(link)
    if not isinstance(bandwidth, int) or bandwidth <= 0:
        raise ValueError(f"--link {link}: write bytes per second, as in 25GB/s")
    shape = shape_of(model)
    size = RequestSize(
        num_vision_tokens=vision_tokens, num_text_tokens=text_tokens, num_output_tokens=output_tokens
    )
    latency = estimate_latency(
        shape, size, encoder=spec_of(encoder), language=spec_of(language), link_bytes_per_s=bandwidth
    )
    if vision_s is not None and language_s is not None:
        latency = eq.Latency(vision_s=vision_s, transfer_s=latency.transfer_s, prefill_s=0.0, decode_s=language_s)
    table = read_prices(prices)
    figures = cost_figures(
        shape,
        size,
        latency,
        encoder_price=price_of(encoder, table),
        language_price=price_of(language, table),
        bandwidth=bandwidth,
        rate=rate,
    )
    figures["times"] = "measured" if vision_s is not None else "analytic, from data sheets"
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(figures, Console(), encoder, language)


def cost_figures(
    shape: ModelShape,
    size: RequestSize,
    latency: eq.Latency,
    *,
    encoder_price: float,
    language_price: float,
    bandwidth: float,
    rate: float,
) -> dict[str, Any]:
    """Equations 1 to 8 for one request size, and the devices for ``rate`` requests per second."""
    vision, text = size.num_vision_tokens, size.num_text_tokens
    kv, features = eq.kv_bytes(shape, vision + text), eq.feature_bytes(shape, vision)
    rho, gamma = latency.ratio, encoder_price / language_price
    encoders, languages = eq.balance(rate, latency)
    return {
        "model": shape.name,
        "kv_bytes": kv,
        "feature_bytes": features,
        "ratio": eq.transfer_ratio(shape, vision, text),
        "ratio_mha": eq.mha_transfer_ratio(shape.language.num_layers, vision, text),
        "kv_s": kv / bandwidth,
        "feature_s": features / bandwidth,
        "kv_share": eq.transfer_share(kv, bandwidth, latency.vision_s),
        "feature_share": eq.transfer_share(features, bandwidth, latency.vision_s),
        "vision_s": latency.vision_s,
        "language_s": latency.language_s,
        "total_s": latency.total_s,
        "rho": rho,
        "gamma": gamma,
        "cost_ratio": eq.cost_ratio(rho, gamma),
        "saving": eq.cost_saving(rho, gamma),
        "rate": rate,
        "encoders": encoders,
        "language_devices": languages,
        "throughput": eq.throughput(encoders, latency.vision_s, languages, latency.language_s),
        "price": encoders * encoder_price + languages * language_price,
    }


def _show(figures: dict[str, Any], console: Console, encoder: str, language: str) -> None:
    table = Table(
        "quantity", "value", "equation", title=f"{figures['model']}: {encoder} encodes, {language} the rest"
    )
    mib = eq.MIB
    for row in (
        ("KV cache of a request", f"{figures['kv_bytes'] / mib:.1f} MiB, {1e3 * figures['kv_s']:.2f} ms", "1"),
        ("its features", f"{figures['feature_bytes'] / mib:.1f} MiB, {1e3 * figures['feature_s']:.2f} ms", "4.1"),
        ("ratio R, with this model's KV heads", f"{figures['ratio']:.1f}", "2"),
        ("ratio R, were all heads KV heads", f"{figures['ratio_mha']:.1f}", "3"),
        ("encoding", f"{1e3 * figures['vision_s']:.3g} ms", "5"),
        ("prefill and decode", f"{1e3 * figures['language_s']:.3g} ms", "5"),
        ("encoders for each language device", f"{figures['rho']:.3f}", "6"),
        ("price ratio", f"{figures['gamma']:.4f}", "7"),
        ("cost against language devices alone", f"{figures['cost_ratio']:.1%}", "7"),
        ("saving", f"{figures['saving']:.1%}", "8"),
    ):
        table.add_row(*row)
    console.print(table)
    for what, share in (("features", figures["feature_share"]), ("the KV cache", figures["kv_share"])):
        console.print(f"For {what} the link {_verdict(share)}: {share:.2g} of the encoding time (equation 4).")
    console.print(
        f"For {figures['rate']:g} requests/s: {figures['encoders']} x {encoder} and "
        f"{figures['language_devices']} x {language} for {figures['price']:,.0f}: "
        f"{figures['throughput']:.2f} requests/s (equation 6). Times are {figures['times']}."
    )


def _verdict(share: float) -> str:
    if share < 0.1:
        return "is no matter"
    return "keeps up" if share < 1 else "is the bottleneck"
