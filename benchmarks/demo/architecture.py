"""The demo model: a Qwen3-VL of under four million parameters, and a vision forward fit for training on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.demo.tokenizer import IMAGE

PATCH = 16
MERGE = 2
TOKEN_PIXELS = PATCH * MERGE
MIN_PIXELS = 28 * TOKEN_PIXELS**2
MAX_PIXELS = 36 * TOKEN_PIXELS**2 + 800  # a little slack: rounding must not cost a square picture its sixth row
HIDDEN = 192
PATCHES_PER_SIDE = 12
_BATCHED_ATTENTION = "equal_images"
_PLAIN_ATTENTION = "plain"

_PIXELS: dict[str, Any] = {
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSOR_FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **_PIXELS},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **_PIXELS},
}


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLForConditionalGeneration:
    """A randomly initialised model in float32 that matches the tokenizer."""
    token_ids = {name: tokenizer.convert_tokens_to_ids(name) for name in tokenizer.get_vocab()}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": PATCHES_PER_SIDE**2,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=token_ids[IMAGE],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def prepare_for_training(model: Qwen3VLForConditionalGeneration) -> None:
    """Swap in a patch embedding and a vision attention that are fast on a CPU; parameters and names stay."""
    visual = model.model.visual
    patch_embed = StillPatchEmbed(visual.patch_embed.proj)
    visual.patch_embed = patch_embed
    ALL_ATTENTION_FUNCTIONS.register(_BATCHED_ATTENTION, _equal_images_attention)
    visual.config._attn_implementation = _BATCHED_ATTENTION
    ALL_ATTENTION_FUNCTIONS.register(_PLAIN_ATTENTION, _plain_attention)
    model.model.language_model.config._attn_implementation = _PLAIN_ATTENTION


class StillPatchEmbed(nn.Module):
    """The patch embedding for still pictures: both frames hold the same pixels, so their weights are summed."""

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches of one frame, `[patches, 3 * 16 * 16]`."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


def patchify(images: np.ndarray[Any, Any]) -> Tensor:
    """One-frame patches, in the image processor's order, of equally large pictures `[n, height, width, 3]`."""
    pixels = torch.from_numpy(images).float() / 127.5 - 1
    count, height, width, _ = pixels.shape
    rows, columns = height // TOKEN_PIXELS, width // TOKEN_PIXELS
    blocks = pixels.reshape(count, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    return blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count * rows * columns * MERGE**2, -1)


def encode_images(visual: nn.Module, images: np.ndarray[Any, Any]) -> tuple[Tensor, list[Tensor]]:
    """Merged features and deepstack features of equally large pictures."""
    count, height, width, _ = images.shape
    grid = torch.tensor([[1, height // PATCH, width // PATCH]]).expand(count, 3)
    patches = patchify(images)
    out = visual(
        patches, grid_thw=grid, cu_seqlens=torch.tensor([0, len(patches)]), num_images=count, return_dict=True
    )
    return out.pooler_output, out.deepstack_features


def _equal_images_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    num_images: int,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within each of `num_images` equally long pictures that lie end to end: one batched product."""
    _, heads, length, width = query.shape

    def per_image(states: Tensor) -> Tensor:
        return states.view(heads, num_images, length // num_images, width).transpose(0, 1)

    scores = per_image(query * scaling) @ per_image(key).transpose(-1, -2)
    out = scores.softmax(-1).to(value.dtype) @ per_image(value)
    return out.permute(0, 2, 1, 3).reshape(1, length, heads, width), None


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by matrix products under an additive mask: on a CPU its backward beats the fused one's."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    folded = (query * scaling).reshape(batch, groups, heads // groups * length, width)
    scores = (folded @ key.transpose(-1, -2)).view(batch, heads, length, length) + attention_mask
    probabilities = scores.softmax(-1).to(value.dtype).view(batch, groups, heads // groups * length, length)
    return (probabilities @ value).view(batch, heads, length, width).transpose(1, 2), None
