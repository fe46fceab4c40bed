"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: images and videos of any resolution, M-RoPE."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

from epd_serve.errors import InvalidRequest
from epd_serve.models.families.text_only import TextOnly
from epd_serve.models.family import TEXT, TRIED_SIZES, Family, Size, blank, names, require
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from torch import Tensor

_TOWER = names(
    "depth hidden_size hidden_act num_heads in_channels patch_size spatial_merge_size temporal_patch_size",
    "rope_parameters",
)
_DEEP_TOWER = _TOWER | names("intermediate_size out_hidden_size num_position_embeddings deepstack_visual_indexes")


class QwenVL(Family):
    """Images and videos of any resolution, resized to whole patches; a video is one run of tokens."""

    title = "Qwen2-VL, Qwen2.5-VL"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl")
    fields = names("image_token_id video_token_id vision_start_token_id vision_end_token_id tie_word_embeddings")
    towers: ClassVar = {
        "qwen2_vl_vision": _TOWER | names("embed_dim mlp_ratio"),
        "qwen2_5_vl_vision": _TOWER | names("intermediate_size out_hidden_size window_size fullatt_block_indexes"),
        "qwen3_vl_vision": _DEEP_TOWER,
        "qwen3_vl_moe_vision": _DEEP_TOWER,
    }
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    num_position_axes = 3
    takes_size_tensors = True
    input_names = ("pixel_values", "image_grid_thw")
    #: Edges of its processor's ``size`` by keys of ``mm_processor_kwargs``; None if requests cannot set them.
    bounds: ClassVar[Mapping[str, str] | None] = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self._merge_area: int = image_processor.merge_size**2
        self._resize: Callable[..., tuple[int, int]] = sys.modules[type(image_processor).__module__].smart_resize

    def grid(self, size: Size) -> tuple[int, int, int]:
        """Return the patches of an image before merging: (frames, rows, columns)."""
        width, height = size
        processor = self.processor
        rows: int
        columns: int
        try:
            rows, columns = self._resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except ValueError as error:
            raise InvalidRequest(f"an image of {width}x{height} pixels cannot be used: {error}") from error
        return 1, rows // processor.patch_size, columns // processor.patch_size

    def with_options(self, asked: Mapping[str, Any]) -> Self:
        if self.bounds is None:
            return super().with_options(asked)
        size = {self.bounds[name]: pixels for name, pixels in asked.items()}
        usual = dict(self.processor.size)
        if (most := max(size.values())) > usual["longest_edge"]:
            raise ValueError(f"images of this model have at most {usual['longest_edge']} pixels, not {most}")
        bounded = copy(self)
        bounded.processor = copy(self.processor)
        bounded.processor.size = type(self.processor.size)(**{**usual, **size})
        return bounded

    def parts(self, size: Size) -> Sequence[int | str]:
        frames, rows, columns = self.grid(size)
        return (frames * rows * columns // self._merge_area,)

    def num_pixels(self, size: Size) -> int:
        frames, rows, columns = self.grid(size)
        patch: int = self.processor.patch_size
        return frames * rows * columns * patch**2

    def check_pictures(self) -> None:
        vision, processor = self.config.vision_config, self.processor
        for ours, theirs in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("spatial_merge_size", "merge_size"),
        ):
            wanted, found = getattr(vision, ours), getattr(processor, theirs)
            if not isinstance(wanted, list | tuple) or found not in wanted:
                require(f"{theirs} of preprocessor_config.json", found, wanted)
            if self.video is not None:
                require(f"{theirs} of the video processor", getattr(self.video.processor, theirs), found)
        # Qwen2-VL's towers call their output width hidden_size
        name = "out_hidden_size" if hasattr(vision, "out_hidden_size") else "hidden_size"
        self.check_width(f"vision_config.{name}", getattr(vision, name))
        for size in TRIED_SIZES:
            made = tuple(self.preprocess(blank(size))["image_grid_thw"][0].tolist())
            require(f"the patches that preprocessor_config.json makes of {size}", made, self.grid(size))

    def check_width(self, name: str, width: int) -> None:
        """Raise ValueError unless the tower's features are as wide as the language model's hidden states."""
        require(name, width, self.config.get_text_config().hidden_size)

    def positions(self, ids: Sequence[int], items: Sequence[MediaRef], model: Any) -> tuple[Tensor, int]:
        import torch

        if not items:
            return torch.arange(len(ids)).expand(3, -1), 0
        tokens = torch.tensor([ids])
        grids: dict[str, list[tuple[int, int, int]]] = {}
        for item in items:
            if item.modality == "image":
                grids.setdefault("image_grid_thw", []).append(self.of(item).grid((item.width, item.height)))
            elif item.modality == "video":
                grids.setdefault("video_grid_thw", []).append(self._video_processor(item).grid(item))
        positions, delta = model.get_rope_index(
            tokens,
            **{name: torch.tensor(grid) for name, grid in grids.items()},
            **self.position_facts(tokens, items),
        )
        return positions[:, 0].long(), int(delta[0, 0])

    def position_facts(self, tokens: Tensor, items: Sequence[MediaRef]) -> dict[str, Tensor]:
        """Return further arguments of transformers' ``get_rope_index`` besides the items' grids."""
        import torch

        kinds = (tokens == self.token_ids["image"]).int() + 2 * (tokens == self.token_ids.get("video", -1)).int()
        videos = [item for item in items if item.modality == "video"]
        seconds = [self._video_processor(item).seconds_per_patch(item) for item in videos]
        return {"mm_token_type_ids": kinds, "second_per_grid_ts": torch.tensor(seconds)}


class Qwen3VL(QwenVL):
    """Each temporal patch of a video follows its timestamp."""

    title = "Qwen3-VL"
    model_types = ("qwen3_vl", "qwen3_vl_moe")

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        processor = self._video_processor(item)
        times = processor.timestamps(item)
        num_rows = processor.num_tokens(item) // len(times)
        parts: list[int | str] = []
        for seconds in times:
            parts += (f"<{seconds:.1f} seconds><|vision_start|>", num_rows, "<|vision_end|>")
        return parts


_TEXT = TEXT | names(
    "head_dim hidden_act rms_norm_eps attention_bias",
    "layer_types linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads",
    "linear_num_value_heads",
)
_EXPERTS = names("num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size")


class Qwen35Text(TextOnly):
    """Qwen3.5 without a tower."""

    title = "Qwen3.5, Qwen3.6 (text)"
    model_types = ("qwen3_5_text", "qwen3_5_moe_text")
    decoder = "generic"
    texts: ClassVar = {"qwen3_5_text": _TEXT, "qwen3_5_moe_text": _TEXT | _EXPERTS}


class Qwen35(Qwen3VL):
    """Each temporal patch of a video follows its timestamp."""

    title = "Qwen3.5, Qwen3.6"
    model_types = ("qwen3_5", "qwen3_5_moe")
    decoder = "generic"
    texts = Qwen35Text.texts
    fields = QwenVL.fields
    towers: ClassVar = dict.fromkeys(
        ("qwen3_5_vision", "qwen3_5_moe_vision"), _DEEP_TOWER - {"deepstack_visual_indexes"}
    )
