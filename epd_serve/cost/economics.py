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


def kv_bytes(shape: ModelShape, num_context_tokens: int) -> int:
    """Equation 1: KV bytes of a request, ``2·L·n_kv·d_h·s_ctx·b``."""
    return shape.kv_token_bytes * num_context_tokens


def feature_bytes(shape: ModelShape, num_vision_tokens: int) -> int:
    """Section 4.1: feature bytes of a request, ``N_v·d·b``."""
    return shape.feature_token_bytes * num_vision_tokens


def transfer_ratio(shape: ModelShape, num_vision_tokens: int, num_text_tokens: int) -> float:
    """Equation 2: R, KV bytes over feature bytes; infinite without images."""
    features = feature_bytes(shape, num_vision_tokens)
    kv = kv_bytes(shape, num_vision_tokens + num_text_tokens)
    return kv / features if features else math.inf


def mha_transfer_ratio(num_layers: int, num_vision_tokens: int, num_text_tokens: int) -> float:
    """Equation 3: R with K and V for each head, ``2·L·(1 + s_text/N_v)``."""
    return 2 * num_layers * (1 + num_text_tokens / num_vision_tokens) if num_vision_tokens else math.inf


def transfer_share(nbytes: float, bytes_per_s: float, vision_s: float) -> float:
    """Equation 4: transfer time over encoding time; feasible if far below 1."""
    return nbytes / bytes_per_s / vision_s


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


def throughput(num_encoders: float, vision_s: float, num_language: float, language_s: float) -> float:
    """Equation 6: requests per second that both pools sustain."""
    return min(num_encoders / vision_s, num_language / language_s)


def balance(rate: float, latency: Latency) -> tuple[int, int]:
    """Return the fewest (encoders, language devices) that sustain ``rate`` requests per second, by equation 6."""
    needed = rate * latency.vision_s, rate * latency.language_s
    return max(math.ceil(needed[0] - 1e-9), 1), max(math.ceil(needed[1] - 1e-9), 1)


def cost_ratio(rho: float, gamma: float) -> float:
    """Equation 7: cost of two tiers over that of language devices alone, with ρ encoders per language device."""
    return (rho * gamma + 1) / (rho + 1)


def cost_saving(rho: float, gamma: float) -> float:
    """Equation 8: ``ρ(1 - γ)/(ρ + 1)``, where γ is the encoder's price over the language device's."""
    return rho * (1 - gamma) / (rho + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSize:
    """Tokens of a request's images, text and answer."""

    num_vision_tokens: int
    num_text_tokens: int
    num_output_tokens: int

    @property
    def num_context_tokens(self) -> int:
        return self.num_vision_tokens + self.num_text_tokens


def estimate_latency(
    shape: ModelShape,
    size: RequestSize,
    *,
    encoder: DeviceSpec,
    language: DeviceSpec,
    link_bytes_per_s: float,
    decode_batch: int = 64,
) -> Latency:
    """Estimate encode and prefill by arithmetic, decode by bytes, with ``decode_batch`` requests in a step.

    Raises ValueError for a model without a tower.
    """
    if shape.vision is None:
        raise ValueError(f"model {shape.name} lacks a vision tower")
    patches = size.num_vision_tokens * shape.vision.merge**2
    encode_flops = 2 * shape.vision.parameters * patches
    compute, memory = language_lines(shape, language)
    mean_context = size.num_context_tokens + size.num_output_tokens / 2
    step_s = (memory.base_s - language.launch_s) / decode_batch + memory.context_s * mean_context
    return Latency(
        vision_s=encode_flops / (encoder.flops * encoder.compute_share),
        transfer_s=feature_bytes(shape, size.num_vision_tokens) / link_bytes_per_s,
        prefill_s=compute.token_s * size.num_context_tokens + compute.pair_s * size.num_context_tokens**2,
        decode_s=step_s * size.num_output_tokens,
    )


def cost_figures(
    shape: ModelShape,
    size: RequestSize,
    latency: Latency,
    *,
    encoder_price: float,
    language_price: float,
    bandwidth: float,
    rate: float,
) -> dict[str, Any]:
    """Return equations 1 to 8 for one request size, and the devices for ``rate`` requests per second."""
    vision, text = size.num_vision_tokens, size.num_text_tokens
    kv, features = kv_bytes(shape, vision + text), feature_bytes(shape, vision)
    rho, gamma = latency.ratio, encoder_price / language_price
    encoders, languages = balance(rate, latency)
    return {
        "model": shape.name,
        "kv_bytes": kv,
        "feature_bytes": features,
        "ratio": transfer_ratio(shape, vision, text),
        "ratio_mha": mha_transfer_ratio(shape.language.num_layers, vision, text),
        "kv_s": kv / bandwidth,
        "feature_s": features / bandwidth,
        "kv_share": transfer_share(kv, bandwidth, latency.vision_s),
        "feature_share": transfer_share(features, bandwidth, latency.vision_s),
        "vision_s": latency.vision_s,
        "language_s": latency.language_s,
        "total_s": latency.total_s,
        "rho": rho,
        "gamma": gamma,
        "cost_ratio": cost_ratio(rho, gamma),
        "saving": cost_saving(rho, gamma),
        "rate": rate,
        "encoders": encoders,
        "language_devices": languages,
        "throughput": throughput(encoders, latency.vision_s, languages, latency.language_s),
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
