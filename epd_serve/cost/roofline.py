"""Stages by arithmetic and bytes alone (TriInfer, appendix B and table 2): the larger of the two decides.

The papers' table counts a feed-forward of two matrices of width 4H and equal heads; here the real widths stand in
their places, which is the same formula for the models that the table is about.
"""

from __future__ import annotations

from device.datasheets import DeviceSpec
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.cost.shape import ModelShape, VisionShape

#: Of a device's memory, what weights and KV may have.
_MEMORY_SHARE = 0.9
#: Of a layer's activations over the links, once behind attention and once behind the feed-forward, in a ring.
_REDUCES = 2


def language_lines(shape: ModelShape, device: DeviceSpec, tensor_parallel: int = 1) -> tuple[Line, ...]:
    """(compute, memory) of a step of the language model, shared out over ``tensor_parallel`` devices."""
    language, width = shape.language, tensor_parallel
    flops = device.flops * device.compute_share * width
    rate = device.bytes_per_s * device.bandwidth_share * width
    # FLOPs of a token and a context
    attention = 4 * language.num_attention_layers * language.num_heads * language.head_dim
    layers = language.layer_parameters
    head = language.hidden * language.vocabulary
    kv = shape.kv_token_bytes
    activations = 12 * language.num_layers * language.hidden * shape.value_bytes
    reduce_s = 0.0
    if width > 1:
        moved = 2 * (width - 1) / width * _REDUCES * language.num_layers * language.hidden * shape.value_bytes
        reduce_s = moved / device.link_bytes_per_s
    # the head is computed for a sequence's last token alone; causal attention sees half of the pairs
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
    """(compute, memory) of a batch of images. Raises ValueError for a model without a tower."""
    tower = shape.vision
    if tower is None:
        raise ValueError(f"model {shape.name} has no vision tower: nothing encodes")
    flops = device.flops * device.compute_share
    rate = device.bytes_per_s * device.bandwidth_share
    weights_s = tower.parameters * shape.value_bytes / rate
    per_patch = 2 * tower.parameters
    if tower.tokens_per_image is not None:
        patches = tower.tokens_per_image * tower.merge**2
        attended = patches * _attended(tower, patches)
        image_flops = patches * per_patch + 4 * tower.hidden * attended
        image_bytes = 12 * tower.num_layers * tower.hidden * patches * shape.value_bytes
        return (
            EncodeLine(base_s=device.launch_s, image_s=image_flops / flops),
            EncodeLine(base_s=device.launch_s + weights_s, image_s=image_bytes / rate),
        )
    area = tower.patch_size**2
    windows = 0.0 if tower.window_patches is None else tower.window_patches
    windowed = 0 if tower.window_patches is None else tower.num_layers - tower.num_full_layers
    full = tower.num_layers - windowed
    return (
        EncodeLine(
            base_s=device.launch_s,
            pixel_s=(per_patch + 4 * tower.hidden * windowed * windows) / area / flops,
            pair_s=4 * tower.hidden * full / area**2 / flops,
        ),
        EncodeLine(
            base_s=device.launch_s + weights_s,
            pixel_s=12 * tower.num_layers * tower.hidden * shape.value_bytes / area / rate,
        ),
    )


def _attended(tower: VisionShape, patches: int) -> float:
    """Patches that one patch attends to, summed over the layers."""
    if tower.window_patches is None:
        return tower.num_layers * patches
    windowed = tower.num_layers - tower.num_full_layers
    return windowed * min(tower.window_patches, patches) + tower.num_full_layers * patches


def analytic_profile(shape: ModelShape, device: DeviceSpec, tensor_parallel: int = 1) -> Profile:
    """Return a profile from the device's data sheet alone; its ``kind`` says so."""
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
        link_bytes_per_s=device.link_bytes_per_s,
    )
