"""The encode stage's model: images in, one feature per image out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from device.base import Device
from device.ops.linear import pack_modules
from device.ops.shared_weights import shared_weights
from epd_serve.models.attention import TowerAttention
from epd_serve.models.family import TowerInputs
from epd_serve.models.loader import ModelPart, load_part, num_parameters
from epd_serve.models.vision_block import replace_blocks


class Tower:
    """Vision tower and projector of a transformers model.

    A feature is [tokens, (1 + deepstack levels) * hidden]: what the language model embeds in place of the image's
    placeholder tokens, followed by what Qwen3-VL adds to the hidden states of its first layers.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: Device,
        before_layer: Callable[[], None] | None = None,
    ) -> None:
        """``before_layer`` is called on the thread that encodes, before each layer of the tower is computed."""
        model = load_part(path, ModelPart.TOWER, dtype).to(device.torch_device)
        attention = TowerAttention(device.ops)
        attention.install(model)
        self._model: Any = model
        self.num_parameters = num_parameters(model)
        with shared_weights(ModelPart.TOWER.value, f"{path} {dtype}"):
            if device.type == "cpu":
                replace_blocks(model, device.ops, attention)
            pack_modules(model)
        if before_layer is not None:
            stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
            for layer in max(stacks, key=len, default=()):
                layer.register_forward_pre_hook(lambda module, arguments: before_layer())
        self._device = device.torch_device
        self.dtype = dtype

    @torch.inference_mode()
    def encode(self, batch: Sequence[TowerInputs]) -> list[Tensor]:
        """Encode several images at once; one feature for each, in order, on the host."""
        inputs = {name: torch.cat([item[name] for item in batch]).to(self._device) for name in batch[0]}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        output = self._model.get_image_features(**inputs, return_dict=True)
        features = [feature.reshape(-1, feature.shape[-1]) for feature in output.pooler_output]
        lengths = [len(feature) for feature in features]
        for level in getattr(output, "deepstack_features", None) or ():
            # one tensor for all images before transformers 5.19, one for each since
            parts = torch.split(level, lengths) if isinstance(level, Tensor) else level
            features = [torch.cat((feature, part), dim=-1) for feature, part in zip(features, parts, strict=True)]
        return [feature.contiguous().cpu() for feature in features]
