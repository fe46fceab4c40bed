"""Bytes that leave a device, and the saving by two kinds of device (HeteroServe, section 4, equations 1 to 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from epd_serve.cost.devices import DeviceSpec
from epd_serve.cost.roofline import language_lines
from epd_serve.cost.shape import ModelShape

#: The paper's "M" is 2**20 bytes: 2·32·32·128·704·2 bytes are its 352 M.
MIB = 2**20


def kv_bytes(shape: ModelShape, num_context_tokens: int) -> int:
    """Equation 1: the KV cache of a request, ``2·L·n_kv·d_h·s_ctx·b``."""
    return shape.kv_token_bytes * num_context_tokens


def feature_bytes(shape: ModelShape, num_vision_tokens: int) -> int:
    """The visual embedding of a request, ``N_v·d·b`` (section 4.1)."""
    return shape.feature_token_bytes * num_vision_tokens


def transfer_ratio(shape: ModelShape, num_vision_tokens: int, num_text_tokens: int) -> float:
    """Equation 2: R, KV bytes over feature bytes. Infinite for a request without images."""
    features = feature_bytes(shape, num_vision_tokens)
    kv = kv_bytes(shape, num_vision_tokens + num_text_tokens)
    return kv / features if features else math.inf


def mha_transfer_ratio(num_layers: int, num_vision_tokens: int, num_text_tokens: int) -> float:
    """Equation 3: R where each head has its own K and V, ``2·L·(1 + s_text/N_v)``."""
    return 2 * num_layers * (1 + num_text_tokens / num_vision_tokens) if num_vision_tokens else math.inf


def transfer_share(nbytes: float, bytes_per_s: float, vision_s: float) -> float:
    """Equation 4: the embedding's time on the link over that of encoding; feasible where it is far below 1."""
    return nbytes / bytes_per_s / vision_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Equation 5: seconds of one request over encoder, link and language device."""

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
        """ρ, vision over language."""
        return self.vision_s / self.language_s


def throughput(num_encoders: float, vision_s: float, num_language: float, language_s: float) -> float:
    """Equation 6: requests per second that both pools can take."""
    return min(num_encoders / vision_s, num_language / language_s)


def balance(rate: float, latency: Latency) -> tuple[int, int]:
    """The fewest (encoders, language devices) that take ``rate`` requests per second, by equation 6.

    At the balance point there are ρ times as many encoders as language devices.
    """
    needed = rate * latency.vision_s, rate * latency.language_s
    return max(math.ceil(needed[0] - 1e-9), 1), max(math.ceil(needed[1] - 1e-9), 1)


def cost_ratio(rho: float, gamma: float) -> float:
    """Equation 7: cost of the two tiers over that of language devices alone, at the balance point."""
    return (rho * gamma + 1) / (rho + 1)


def cost_saving(rho: float, gamma: float) -> float:
    """Equation 8: ``ρ(1 - γ)/(ρ + 1)``, with γ the encoder's price over the language device's."""
    return rho * (1 - gamma) / (rho + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSize:
    """Tokens of one request: of its images, of its text, of its answer."""

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
    """Encode and prefill by arithmetic, decode by bytes, ``decode_batch`` requests sharing the weights' bytes.

    Raises ValueError for a model without a tower.
    """
    if shape.vision is None:
        raise ValueError(f"model {shape.name} has no vision tower: nothing encodes")
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
