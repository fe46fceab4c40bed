"""Roofline times of stages: the larger of arithmetic and memory time (TriInfer, appendix B and table 2).

The papers assume a feed-forward of two matrices of width 4H and equal heads; here the model's real widths are
used.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from device.datasheets import DeviceSpec, is_measured, spec_of
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.cost.shape import ModelShape, shape_of

#: Share of a device's memory for weights and KV.
_MEMORY_SHARE = 0.9
#: Ring all-reduces of a layer's activations: after attention and after the feed-forward.
_REDUCES = 2


def language_lines(shape: ModelShape, device: DeviceSpec, tensor_parallel: int = 1) -> tuple[Line, ...]:
    """Return the (compute, memory) lines of a language model step on ``tensor_parallel`` devices."""
    language, width = shape.language, tensor_parallel
    flops = device.flops * device.compute_share * width
    rate = device.bytes_per_s * device.bandwidth_share * width
    # FLOPs of a token for each token of its context
    attention = 4 * language.num_attention_layers * language.num_heads * language.head_dim
    layers = language.layer_parameters
    head = language.hidden * language.vocabulary
    kv = shape.kv_token_bytes
    activations = 12 * language.num_layers * language.hidden * shape.value_bytes
    reduce_s = 0.0
    if width > 1:
        moved = 2 * (width - 1) / width * _REDUCES * language.num_layers * language.hidden * shape.value_bytes
        reduce_s = moved / device.link_bytes_per_s
    # the head runs for a sequence's last token only; causal attention covers half of the pairs
    compute = Line(
        base_s=device.launch_s,
        token_s=2 * layers / flops + reduce_s,
        sequence_s=2 * head / flops,
        context_s=attention / flops,
        pair_s=attention / 2 / flops,
    )
    memory = Line(
        base_s=device.launch_s + (layers + head) * shape.value_bytes / rate,
        token_s=(activations + kv) / rate + reduce_s,
        sequence_s=2 * shape.state_bytes / rate,  # read and written
        context_s=kv / rate,
        pair_s=0.0,
    )
    return compute, memory


def encode_lines(shape: ModelShape, device: DeviceSpec) -> tuple[EncodeLine, ...]:
    """Return the (compute, memory) lines of a batch of images. Raises ValueError for a model without a tower."""
    tower = shape.vision
    if tower is None:
        raise ValueError(f"model {shape.name} lacks a vision tower")
    flops = device.flops * device.compute_share
    rate = device.bytes_per_s * device.bandwidth_share
    weights_s = tower.parameters * shape.value_bytes / rate
    patches = None if tower.tokens_per_image is None else tower.tokens_per_image * tower.merge**2
    window = tower.window_patches or 0
    windowed = tower.num_layers - tower.num_full_layers if window else 0
    if patches is not None:
        window = min(window, patches)
    # FLOPs for each patch, and for each pair of patches in layers without windows
    patch_flops = 2 * tower.parameters + 4 * tower.hidden * windowed * window
    pair_flops = 4 * tower.hidden * (tower.num_layers - windowed)
    patch_bytes = 12 * tower.num_layers * tower.hidden * shape.value_bytes
    compute = EncodeLine(base_s=device.launch_s)
    memory = EncodeLine(base_s=device.launch_s + weights_s)
    if patches is not None:
        image_flops = patch_flops * patches + pair_flops * patches**2
        return (
            msgspec.structs.replace(compute, image_s=image_flops / flops),
            msgspec.structs.replace(memory, image_s=patch_bytes * patches / rate),
        )
    area = tower.patch_size**2
    return (
        msgspec.structs.replace(compute, pixel_s=patch_flops / area / flops, pair_s=pair_flops / area**2 / flops),
        msgspec.structs.replace(memory, pixel_s=patch_bytes / area / rate),
    )


def analytic_profile(shape: ModelShape, device: DeviceSpec, tensor_parallel: int = 1) -> Profile:
    """Return an "analytic" profile, from the device's data sheet alone."""
    weights = shape.language.parameters + shape.language.hidden * shape.language.vocabulary
    tower = 0 if shape.vision is None else shape.vision.parameters
    memory = _MEMORY_SHARE * device.memory_bytes * tensor_parallel
    return Profile(
        kind="analytic",
        device=device.name,
        description=f"{device.name} by its data sheet: {device.flops / 1e12:.0f} TFLOP/s, "
        f"{device.bytes_per_s / 1e9:.0f} GB/s",
        model=shape.name,
        tensor_parallel=tensor_parallel,
        step=language_lines(shape, device, tensor_parallel),
        encode=() if shape.vision is None else encode_lines(shape, device),
        compute_share=device.compute_share,
        bandwidth_share=device.bandwidth_share,
        memory_bytes=memory,
        language_bytes=float(weights * shape.value_bytes),
        tower_bytes=float(tower * shape.value_bytes),
        kv_token_bytes=shape.kv_token_bytes,
        state_bytes=shape.state_bytes,
        feature_token_bytes=shape.feature_token_bytes,
        num_layers=shape.language.num_kv_layers,
        pixels_per_token=0 if shape.vision is None else shape.vision.pixels_per_token,
        tokens_per_image=None if shape.vision is None else shape.vision.tokens_per_image,
        min_pixels=1 if shape.vision is None else shape.vision.min_pixels,
        max_pixels=1 << 31 if shape.vision is None else shape.vision.max_pixels,
        link_bytes_per_s=device.link_bytes_per_s,
    )


def emulated_profile(model: str, kind: str) -> Profile:
    """Return the times of a model on an emulated device, without the host's part.

    Args:
        model: a name for :func:`~epd_serve.cost.shape.shape_of`; "" for the model of the profile.
        kind: name of a data sheet, or file written by ``epd-serve profile``.

    Raises ValueError for an unknown model or kind, and for the profile of another model.
    """
    if not is_measured(kind):  # the real host takes its own time to launch a step
        return analytic_profile(shape_of(model), replace(spec_of(kind), launch_s=0.0))
    profile = Profile.read(Path(kind))
    if model and (num_layers := shape_of(model).language.num_kv_layers) != profile.num_layers:
        raise ValueError(
            f"{kind} is the profile of {profile.model} with {profile.num_layers} layers, but {model} has "
            f"{num_layers}; make a profile of it with 'epd-serve profile'"
        )
    return profile
