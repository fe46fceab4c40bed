"""Equation 5 of HeteroServe from a model's sizes and the data sheets of two devices."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.cost.devices import DeviceSpec
from epd_serve.cost.economics import Latency, feature_bytes
from epd_serve.cost.roofline import language_lines
from epd_serve.cost.shape import ModelShape


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
