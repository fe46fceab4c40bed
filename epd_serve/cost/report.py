"""The figures of ``epd-serve cost``: equations 1 to 8 of HeteroServe for one size of request; prices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from epd_serve.cost import economics as eq
from epd_serve.cost.devices import DEVICE_SPECS, spec_of
from epd_serve.cost.economics import RequestSize
from epd_serve.cost.shape import ModelShape


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


def show_cost(figures: dict[str, Any], console: Console, encoder: str, language: str) -> None:
    """As a table, and a sentence for each link and for the devices."""
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


def read_prices(path: Path | None) -> dict[str, float]:
    """Prices by device: HeteroServe's for two of them, over which a YAML file of ``name: price`` goes.

    Raises ValueError that names the file and what is wrong with it.
    """
    prices = {name: spec.price for name, spec in DEVICE_SPECS.items() if spec.price is not None}
    if path is None:
        return prices
    try:
        table = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"price table {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"price table {path}: no YAML: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"price table {path}: expected lines such as 'a100: 16000'")
    for name, price in table.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < float("inf"):
            raise ValueError(f"price table {path}: {name} costs {price!r}; write a number above 0")
        prices[spec_of(str(name)).name] = float(price)
    return prices


def price_of(name: str, prices: dict[str, float]) -> float:
    """The price of one device. Raises ValueError for a device without a price."""
    key = spec_of(name).name
    if key not in prices:
        raise ValueError(f"{key} has no price; give a table with --prices, with a line such as '{key}: 10000'")
    return prices[key]
