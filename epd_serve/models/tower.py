"""Model of the encode stage: media in, one feature per item out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from device.base import AttentionOps, Device
from device.copies import to_device
from device.ops.linear import Product, activated_linear, fused, gated_linear, pack_modules
from epd_serve.models.families import family_of
from epd_serve.models.family import TRIED_SECONDS, TRIED_SIZES, Family, TowerInputs, picture, sound
from epd_serve.models.loader import ModelPart, attend_by, load_part, num_parameters
from epd_serve.protocol.wire import MediaRef

logger = logging.getLogger(__name__)


class TowerAttention:
    """A tower's attention function, in transformers' convention, over ``ops.encode``.

    Its name contains "flash", which makes transformers pass all images of a batch at once with their borders,
    instead of looping over them.

    Attributes:
        borders: host values of borders on the device, which avoids reading them back.
    """

    def __init__(self, ops: AttentionOps) -> None:
        self.name = f"epd_flash_{id(self):x}"
        self._ops = ops
        self.borders: Any = WeakTensorKeyDictionary()
        ALL_ATTENTION_FUNCTIONS.register(self.name, self)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend with query, key and value [B, H, T, D] within segments (borders [S + 1]) or each row.

        Borders take precedence over an equivalent mask.

        Returns:
            [B, T, H, D] and no weights.
        """
        if attention_mask is not None and cu_seq_lens_q is None:
            raise _MaskedInput
        batch, heads, length, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else scaling
        # undo transformers' swap of tokens and heads, for free with one row
        query, key, value = (
            states.transpose(1, 2).reshape(batch * length, heads, head_dim) for states in (query, key, value)
        )
        if cu_seq_lens_q is not None:
            output = self.attend(query, key, value, cu_seq_lens_q, scale)
        else:
            output = self._ops.encode(query, key, value, range(0, batch * length + 1, length), scale)
        return output.view(batch, length, heads, head_dim), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float) -> Tensor:
        """Attend [T, H, D] within segments. Borders, the same in all layers, are read from the device once."""
        if borders not in self.borders:
            self.borders[borders] = borders.tolist()
        return self._ops.encode(query, key, value, self.borders[borders], scale)


class _MaskedInput(Exception):
    """The tower masks a part of its input, which the device's attention cannot do."""


class Tower:
    """Vision tower and projector of a transformers model.

    A feature is [tokens, (1 + deepstack levels) * hidden]: the embeddings that replace the image's placeholder
    tokens, followed by Qwen3-VL's additions to the hidden states of the first layers.

    Attributes:
        uses_device_attention: True if its layers use the device's attention, not torch's.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: Device,
        before_layer: Callable[[], None] | None = None,
        family: Family | None = None,
    ) -> None:
        """Load the tower. Raises ValueError if its features have other token counts than its family computes.

        Args:
            before_layer: called on the encoding thread before each layer of the tower.
            family: enables a test on its media: if features differ between the device's attention and torch's, as
                with padded inputs, torch's is used.
        """
        model = load_part(path, ModelPart.TOWER, dtype, device.torch_device)
        attention = TowerAttention(device.ops)
        attend_by(model, attention.name)
        self._model: Any = model
        self.num_parameters = num_parameters(model)
        self._device, self._record_event = device.torch_device, device.record_event
        self.dtype = dtype
        kind = family_of(model.config)
        self._joins, self._features = kind.joins, kind.features
        self._attention = attention
        self._visual: Any = model.get_submodule("model.visual") if kind.takes_size_tensors else None
        if device.type != "npu":
            replace_blocks(model, device.ops, attention)
        pack_modules(model)
        self.uses_device_attention = True
        if family is not None:
            self._try(family, attention)
        if before_layer is not None:
            for layer in chain.from_iterable(map(_layers, model.get_submodule("model").children())):
                layer.register_forward_pre_hook(lambda module, arguments: before_layer())

    def _try(self, family: Family, attention: TowerAttention) -> None:
        """Choose the attention by the features of two images and two audio clips, joined if possible."""
        items, batch = zip(*_tried(family), strict=True)
        has_own_layers = any(isinstance(module, VisionBlock) for module in self._model.modules())
        features: list[Tensor] = []
        with suppress(_MaskedInput):
            features = self.encode(batch)
        if not has_own_layers:
            attend_by(self._model, "sdpa")
            expected = [self.encode([item])[0] for item in batch]
            self.uses_device_attention = bool(features) and all(map(_agree, features, expected))
            if self.uses_device_attention:
                attend_by(self._model, attention.name)
            else:
                logger.warning("the tower uses torch's attention: the device's attention gives different features")
                features = expected
        for item, feature in zip(items, features, strict=True):
            if len(feature) != (count := family.num_tokens(item)):
                what = f"an image of {item.width}x{item.height} pixels"
                if item.modality == "audio":
                    what = f"audio of {item.num_samples} samples"
                raise ValueError(
                    f"the tower makes {len(feature)} tokens of {what}, where config.json and "
                    f"preprocessor_config.json say {count}; use files from the same checkpoint"
                )

    @torch.inference_mode()
    def encode(self, batch: Sequence[TowerInputs], *, on_device: bool = False) -> list[Tensor]:
        """Encode several items, joined if possible; return their features, on the host unless ``on_device``."""
        calls: list[list[TowerInputs]] = []
        for item in batch:
            if calls and self._joins and _shapes(calls[-1][0]) == _shapes(item):
                calls[-1].append(item)
            else:
                calls.append([item])
        features = [feature for call in calls for feature in self._call(call)]
        if not on_device:
            return [feature.cpu() for feature in features]
        self._record_event().synchronize()
        return features

    def _call(self, batch: Sequence[TowerInputs]) -> list[Tensor]:
        inputs = {
            name: torch.cat([item[name] for item in batch]) if len(batch) > 1 else own
            for name, own in batch[0].items()
        }
        values = "input_features" if "input_features" in inputs else "pixel_values"
        inputs[values] = inputs[values].to(self.dtype)
        known: dict[str, Any] = {}  # known values, to avoid computing them or reading them back
        if self._visual is not None and "image_grid_thw" in inputs:
            grid = inputs.pop("image_grid_thw")
            tensors = _size_tensors(self._visual, grid)
            known = {"image_grid_thw": grid}
            known |= {name: to_device(tensor, self._device) for name, tensor in tensors.items()}
            for name in _LONGEST.keys() & tensors.keys():
                self._attention.borders[known[name]] = tensors[name].tolist()
                known[_LONGEST[name]] = int(tensors[name].diff().max())
        inputs = {name: to_device(tensor, self._device) for name, tensor in inputs.items()} | known
        output = self._features(self._model, inputs)
        features = [feature.reshape(-1, feature.shape[-1]) for feature in output.pooler_output]
        if len(features) != len(batch):  # one per tile if images are tiles along dimension 0
            tiles = iter(features)
            features = [torch.cat(list(islice(tiles, len(item[values])))) for item in batch]
        for level in getattr(output, "deepstack_features", None) or ():
            features = [torch.cat(parts, dim=-1) for parts in zip(features, level, strict=True)]
        return [feature.contiguous() for feature in features]


#: Argument for the longest segment, by the name of its borders.
_LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}


def _size_tensors(visual: Any, grid: Tensor) -> dict[str, Tensor]:
    """Return host tensors that a transformers tower derives from image sizes [N, 3], by argument name."""
    merge = visual.spatial_merge_size
    tensors = {"position_ids": get_vision_position_ids(grid, merge), "cu_seqlens": get_vision_cu_seqlens(grid)}
    if hasattr(visual, "window_size"):
        index, borders = get_vision_window_index(grid, merge, visual.window_size, visual.patch_size)
        tensors |= {"window_index": index, "cu_window_seqlens": borders}
    if hasattr(visual, "num_grid_per_side"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        tensors |= {"interp_indices": indices, "interp_weights": weights}
    return tensors


def _tried(family: Family) -> Iterator[tuple[MediaRef, TowerInputs]]:
    """Yield reproducible random items; audio of two lengths, which may need padding."""
    if "image" in family.token_ids:
        for size in TRIED_SIZES[1:]:  # one wide, one tall
            pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            yield picture(size), family.preprocess(pixels)
    if family.audio is not None:
        for seconds in TRIED_SECONDS:
            item = sound(seconds, family.audio.rate)
            noise = np.random.default_rng(0).uniform(-1, 1, item.num_samples).astype(np.float32)
            yield item, family.audio.inputs(noise)


def _agree(feature: Tensor, expected: Tensor) -> bool:
    """Return whether two features differ only by rounding."""
    if feature.shape != expected.shape:
        return False
    most = 1e-3 if feature.dtype == torch.float32 else 0.05
    feature, expected = feature.float(), expected.float()
    return bool((feature - expected).abs().mean() <= most * expected.abs().mean())


def _layers(part: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a tower; empty for a projector."""
    lists = (list(one) for one in part.modules() if isinstance(one, nn.ModuleList))
    return max(lists, key=len, default=[])


def _shapes(inputs: TowerInputs) -> dict[str, torch.Size]:
    """Return the shapes that inputs must share to be joined."""
    return {name: tensor.shape[1:] for name, tensor in inputs.items()}


_BLOCKS = ("Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock", "Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock")


class VisionBlock(nn.Module):
    """A layer of Qwen's vision towers with the products, norms and rotation of the language model's layers.

    transformers rotates in float32 and activates, gates and adds in separate passes: on a CPU these take as long
    as the products, and on a GPU the host launches three times as many kernels.
    """

    def __init__(self, block: Any, ops: AttentionOps, attention: TowerAttention) -> None:
        super().__init__()
        self._ops = ops
        self._attend = attention.attend
        self._num_heads: int = block.attn.num_heads
        self._scale: float = block.attn.scaling
        self._norms = [_norm(block.norm1, ops), _norm(block.norm2, ops)]
        self._qkv, self._output = _product(block.attn.qkv), _product(block.attn.proj)
        if hasattr(block.mlp, "gate_proj"):
            gate, up = block.mlp.gate_proj, block.mlp.up_proj
            biases = None if gate.bias is None else (gate.bias.detach(), up.bias.detach())
            weights = gate.weight.detach(), up.weight.detach()
            self._inner = gated_linear(*weights, ops.swiglu, biases, fused(block.mlp.act_fn))
            self._down = _product(block.mlp.down_proj)
        else:
            names = ("linear_fc1", "linear_fc2") if hasattr(block.mlp, "linear_fc1") else ("fc1", "fc2")
            inner, down = (getattr(block.mlp, name) for name in names)
            activation = fused(getattr(block.mlp, "act_fn", None) or block.mlp.act)
            self._inner = activated_linear(inner.weight.detach(), inner.bias.detach(), activation)
            self._down = _product(down)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """Compute [T, hidden] from hidden states [T, hidden], borders [S + 1], cos and sin [T, head_dim]."""
        first_norm, second_norm = self._norms
        states = self._qkv(first_norm(hidden_states)).view(len(hidden_states), 3 * self._num_heads, -1)
        query, key, value = states.chunk(3, dim=1)
        query, key = self._ops.rotary(query, key, *position_embeddings)
        attended = self._attend(query, key, value, cu_seqlens, self._scale)
        hidden_states = self._output(attended.flatten(1), add=hidden_states)
        return self._down(self._inner(second_norm(hidden_states)), add=hidden_states)


def replace_blocks(model: nn.Module, ops: AttentionOps, attention: TowerAttention) -> None:
    """Replace the layers of Qwen's towers with :class:`VisionBlock`."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for index, block in enumerate(module):
                if type(block).__name__ in _BLOCKS:
                    module[index] = VisionBlock(block, ops, attention)


def _product(module: Any) -> Product:
    return Product(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any, ops: AttentionOps) -> Any:
    if isinstance(module, nn.LayerNorm):
        return module
    weight, epsilon = module.weight.detach(), module.variance_epsilon
    return lambda hidden: ops.rms_norm(hidden, weight, epsilon)
