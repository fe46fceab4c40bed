"""The bytes and prices behind ``epd-serve cost`` (HeteroServe, section 4, equations 1 to 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from device.datasheets import DEVICE_SPECS, DeviceSpec, spec_of
from epd_serve.cost.roofline import language_lines
from epd_serve.cost.shape import ModelShape

#: The paper's "M": 2·32·32·128·704·2 bytes are its 352 M.
MIB = 2**20
#: Requests that share a decode step.
DECODE_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Equation 5: seconds of a request on encoder, link and language device."""

    vision_s: float
    transfer_s: float
    prefill_s: float
    decode_s: float

    @property
    def language_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def total_s(self) -> float:
        return self.vision_s + self.transfer_s + self.language_s

    @property
    def ratio(self) -> float:
        """ρ, vision time over language time."""
        return self.vision_s / self.language_s


def estimate_latency(
    shape: ModelShape,
    *,
    vision_tokens: int,
    text_tokens: int,
    output_tokens: int,
    encoder: DeviceSpec,
    language: DeviceSpec,
    link_bytes_per_s: float,
) -> Latency:
    """Estimate encode and prefill by arithmetic, decode by bytes, with :data:`DECODE_BATCH` requests in a step.

    Raises ValueError for a model without a tower.
    """
    if shape.vision is None:
        raise ValueError(f"model {shape.name} lacks a vision tower")
    context = vision_tokens + text_tokens
    patches = vision_tokens * shape.vision.merge**2
    encode_flops = 2 * shape.vision.parameters * patches
    compute, memory = language_lines(shape, language)
    step_s = (memory.base_s - language.launch_s) / DECODE_BATCH + memory.context_s * (context + output_tokens / 2)
    return Latency(
        vision_s=encode_flops / (encoder.flops * encoder.compute_share),
        transfer_s=shape.feature_token_bytes * vision_tokens / link_bytes_per_s,
        prefill_s=compute.token_s * context + compute.pair_s * context**2,
        decode_s=step_s * output_tokens,
    )


def balance(rate: float, latency: Latency) -> tuple[int, int]:
    """Return the fewest (encoders, language devices) that sustain ``rate`` requests per second, by equation 6."""
    needed = rate * latency.vision_s, rate * latency.language_s
    return max(math.ceil(needed[0] - 1e-9), 1), max(math.ceil(needed[1] - 1e-9), 1)


def cost_figures(
    shape: ModelShape,
    latency: Latency,
    *,
    vision_tokens: int,
    text_tokens: int,
    encoder_price: float,
    language_price: float,
    bandwidth: float,
    rate: float,
) -> dict[str, Any]:
    """Return equations 1 to 8 for a request, and the devices for ``rate`` requests per second."""
    kv = shape.kv_token_bytes * (vision_tokens + text_tokens)  # equation 1: 2·L·n_kv·d_h·s_ctx·b
    features = shape.feature_token_bytes * vision_tokens  # section 4.1: N_v·d·b
    rho, gamma = latency.ratio, encoder_price / language_price
    encoders, languages = balance(rate, latency)
    return {
        "model": shape.name,
        "kv_bytes": kv,
        "feature_bytes": features,
        "ratio": kv / features,  # equation 2
        "ratio_mha": 2
        * shape.language.num_layers
        * (1 + text_tokens / vision_tokens),  # equation 3: K and V for each head
        "kv_s": kv / bandwidth,
        "feature_s": features / bandwidth,
        "kv_share": kv / bandwidth / latency.vision_s,  # equation 4: feasible if far below 1
        "feature_share": features / bandwidth / latency.vision_s,
        "vision_s": latency.vision_s,
        "language_s": latency.language_s,
        "total_s": latency.total_s,
        "rho": rho,
        "gamma": gamma,
        "cost_ratio": (rho * gamma + 1) / (rho + 1),  # equation 7: against language devices alone
        "saving": rho * (1 - gamma) / (rho + 1),  # equation 8
        "rate": rate,
        "encoders": encoders,
        "language_devices": languages,
        "throughput": min(encoders / latency.vision_s, languages / latency.language_s),  # equation 6
        "price": encoders * encoder_price + languages * language_price,
    }


def show_cost(figures: dict[str, Any], console: Console, encoder: str, language: str) -> None:
    """Print the figures of :func:`cost_figures`."""
    table = Table(
        "quantity", "value", "equation", title=f"{figures['model']}: {encoder} encodes, {language} does the rest"
    )
    for row in (
        ("KV cache of a request", f"{figures['kv_bytes'] / MIB:.1f} MiB, {1e3 * figures['kv_s']:.2f} ms", "1"),
        ("its features", f"{figures['feature_bytes'] / MIB:.1f} MiB, {1e3 * figures['feature_s']:.2f} ms", "4.1"),
        ("ratio R, with this model's KV heads", f"{figures['ratio']:.1f}", "2"),
        ("ratio R, if all heads were KV heads", f"{figures['ratio_mha']:.1f}", "3"),
        ("encoding", f"{1e3 * figures['vision_s']:.3g} ms", "5"),
        ("prefill and decode", f"{1e3 * figures['language_s']:.3g} ms", "5"),
        ("encoders for each language device", f"{figures['rho']:.3f}", "6"),
        ("price ratio", f"{figures['gamma']:.4f}", "7"),
        ("cost against language devices alone", f"{figures['cost_ratio']:.1%}", "7"),
        ("saving", f"{figures['saving']:.1%}", "8"),
    ):
        table.add_row(*row)
    console.print(table)
    for payload, share in (("features", figures["feature_share"]), ("the KV cache", figures["kv_share"])):
        verdict = "is negligible" if share < 0.1 else "keeps up" if share < 1 else "is the bottleneck"
        console.print(f"For {payload} the link {verdict}: {share:.2g} of the encoding time (equation 4).")
    console.print(
        f"For {figures['rate']:g} requests/s: {figures['encoders']} x {encoder} and "
        f"{figures['language_devices']} x {language} for {figures['price']:,.0f}: "
        f"{figures['throughput']:.2f} requests/s (equation 6). Times are {figures['times']}."
    )


def read_prices(path: Path | None) -> dict[str, float]:
    """Return prices by device: HeteroServe's two, overridden by a YAML file of ``name: price``.

    Raises ValueError, which names the file and the fault.
    """
    prices = {name: spec.price for name, spec in DEVICE_SPECS.items() if spec.price is not None}
    if path is None:
        return prices
    try:
        table = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"price table {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"price table {path}: invalid YAML: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"price table {path}: expected lines such as 'a100: 16000'")
    for name, price in table.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < float("inf"):
            raise ValueError(f"price table {path}: {name} costs {price!r}; it must be a number above 0")
        prices[spec_of(str(name)).name] = float(price)
    return prices


def price_of(name: str, prices: dict[str, float]) -> float:
    """Return the price of a device. Raises ValueError if it is unknown."""
    key = spec_of(name).name
    if key not in prices:
        raise ValueError(f"the price of {key} is unknown; pass --prices with a '{key}: 10000' line")
    return prices[key]
