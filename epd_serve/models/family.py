"""Conventions in which model families differ: tokens per image, the tower's inputs, rotary positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor

from epd_serve.errors import InvalidRequest
from epd_serve.models.checkpoint_config import read_config
from epd_serve.models.model_types import LLAVA, QWEN_VL, TEXT

#: Tower inputs of one image by argument name; a batch concatenates them along dimension 0.
TowerInputs = dict[str, Tensor]

#: Sizes of pictures that a family's arithmetic is held against its processor with.
_TRIED_SIZES = ((64, 64), (200, 50), (50, 300))
#: Tokens that a tower puts before those of the patches.
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class Family(Protocol):
    """One model family's conventions. Sizes are (width, height) in pixels as displayed."""

    config: Any
    #: Whether it has a tower; a family of text alone refuses each size of an image.
    takes_images: bool
    image_token_id: int
    #: Axes of the rotary positions: 3 for M-RoPE, 1 else.
    num_position_axes: int

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        """Placeholder tokens that stand for an image. Raises InvalidRequest for a size the model cannot take."""
        ...

    def num_pixels(self, size: tuple[int, int]) -> int:
        """Pixels of an image that the tower sees, once it is resized. Raises as :meth:`num_image_tokens`."""
        ...

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        """RGB pixels [height, width, 3] → tower inputs, which share no memory with them."""
        ...

    def check(self) -> None:
        """Raise ValueError where the processor makes other inputs than the tower's configuration is for."""
        ...

    def positions(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]], model: Any) -> tuple[Tensor, int]:
        """Rotary positions [axes, len(ids)] of a prompt with images of these sizes, and the decode delta."""
        ...


class QwenVL:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: any resolution, M-RoPE."""

    takes_images = True
    num_position_axes = 3

    def __init__(self, config: Any, image_processor: Any) -> None:
        self.config = config
        self.image_token_id: int = config.image_token_id
        self._processor = image_processor
        self._merge_area: int = image_processor.merge_size**2
        self._resize: Callable[..., tuple[int, int]] = sys.modules[type(image_processor).__module__].smart_resize

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Patches of an image: (frames, rows, columns), before merging."""
        width, height = size
        processor = self._processor
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

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        frames, rows, columns = self.grid(size)
        return frames * rows * columns // self._merge_area

    def num_pixels(self, size: tuple[int, int]) -> int:
        frames, rows, columns = self.grid(size)
        patch: int = self._processor.patch_size
        return frames * rows * columns * patch**2

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        batch = self._processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        return {name: batch[name] for name in ("pixel_values", "image_grid_thw")}

    def check(self) -> None:
        vision, processor = self.config.vision_config, self._processor
        for ours, theirs in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("spatial_merge_size", "merge_size"),
        ):
            wanted, found = getattr(vision, ours), getattr(processor, theirs)
            if found not in (wanted, *(set(wanted) if isinstance(wanted, list | tuple) else ())):
                raise ValueError(
                    f"vision_config.{ours} is {wanted}, but {theirs} of preprocessor_config.json is {found}; "
                    "they must be equal"
                )
        # the towers of Qwen2-VL call the width of what they hand out hidden_size
        name = "out_hidden_size" if hasattr(vision, "out_hidden_size") else "hidden_size"
        width, needed = getattr(vision, name), self.config.get_text_config().hidden_size
        if width != needed:
            raise ValueError(f"vision_config.{name} is {width}; it must be text_config.hidden_size, {needed}")
        for size in _TRIED_SIZES:
            expected, made = self.grid(size), tuple(self.preprocess(blank(size))["image_grid_thw"][0].tolist())
            if expected != made:
                raise ValueError(
                    f"preprocessor_config.json makes {made} patches of a picture of {size} pixels, where "
                    f"{expected} are expected: pictures must be resized, with the sizes of its family"
                )

    def positions(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]], model: Any) -> tuple[Tensor, int]:
        tokens = torch.tensor([ids])
        if not sizes:
            return torch.arange(len(ids)).expand(3, -1), 0
        positions, delta = model.get_rope_index(
            tokens,
            image_grid_thw=torch.tensor([self.grid(size) for size in sizes]),
            mm_token_type_ids=(tokens == self.image_token_id).int(),
        )
        return positions[:, 0], int(delta[0, 0])


class Llava:
    """LLaVA-1.5: every image is scaled and cropped to one size; plain rotary positions."""

    takes_images = True
    num_position_axes = 1

    def __init__(self, config: Any, image_processor: Any) -> None:
        self.config = config
        self.image_token_id: int = getattr(config, "image_token_id", None) or config.image_token_index
        self._processor = image_processor
        vision = config.vision_config
        self._num_pixels: int = vision.image_size**2
        self._num_tokens: int = (vision.image_size // vision.patch_size) ** 2 + _CLASS_TOKENS[vision.model_type]
        if config.vision_feature_select_strategy == "default":
            self._num_tokens -= 1  # the first, whatever it stands for

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        return self._num_tokens

    def num_pixels(self, size: tuple[int, int]) -> int:
        return self._num_pixels

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        batch = self._processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        return {"pixel_values": batch["pixel_values"]}

    def check(self) -> None:
        wanted = self.config.vision_config.image_size
        for size in _TRIED_SIZES:
            rows, columns = self.preprocess(blank(size))["pixel_values"].shape[-2:]
            if (rows, columns) != (wanted, wanted):
                raise ValueError(
                    f"vision_config.image_size is {wanted}, but preprocessor_config.json makes {columns}x{rows} "
                    f"pixels of a picture of {size}; it must make {wanted}x{wanted}"
                )

    def positions(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]], model: Any) -> tuple[Tensor, int]:
        return torch.arange(len(ids)).unsqueeze(0), 0


class TextOnly:
    """Llama, Mistral, Qwen2, Qwen3: language models without a tower; plain rotary positions."""

    takes_images = False
    image_token_id = -1
    num_position_axes = 1

    def __init__(self, config: Any) -> None:
        self.config = config

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        raise InvalidRequest("the model takes text alone; leave out the images", param="messages")

    num_pixels = num_image_tokens

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        raise InvalidRequest("the model takes text alone; it has no tower that encodes an image")

    def check(self) -> None:
        pass

    def positions(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]], model: Any) -> tuple[Tensor, int]:
        return torch.arange(len(ids)).unsqueeze(0), 0


_FAMILIES: dict[str, Callable[[Any, Any], Family]] = {
    **dict.fromkeys(QWEN_VL, QwenVL),
    **dict.fromkeys(LLAVA, Llava),
}


def load_family(path: Path) -> Family:
    """The family of the model in ``path``. Raises ValueError for a model that the engine would not run rightly."""
    config = read_config(path)
    if config.model_type in TEXT:
        return TextOnly(config)
    family = _FAMILIES[config.model_type](config, AutoImageProcessor.from_pretrained(path, local_files_only=True))
    try:
        family.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return family


def blank(size: tuple[int, int]) -> NDArray[np.uint8]:
    """A grey picture of that width and height."""
    return np.full((size[1], size[0], 3), 128, np.uint8)
