"""Device graphs, by number of patches, for towers with images of any resolution.

Positions, windows and image borders depend on values, not only on shapes. transformers accepts them as
arguments, so they are computed on the host and a graph reads them from buffers.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from device.base import Device, GraphRunner

#: Captured batch sizes in patches. For larger batches the device takes longer than the host's launches.
GRAPH_SIZES = (256, 512, 1024, 1536, 2048)
#: Minimum average patches of an image and of a window, which bound the borders of a graph.
_LEAST_PATCHES = {"cu_seqlens": 32, "cu_window_seqlens": 16}
#: Argument for the longest segment, by the name of its borders.
LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}


def size_tensors(visual: Any, grid: Tensor) -> dict[str, Tensor]:
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


class TowerGraphs:
    """Captures a tower for batches of ``sizes`` patches; batches are padded to the next size.

    Padding follows the last border, so that image patches do not attend to it; all other operations of a tower
    work on single patches, or on groups that become one token.

    Args:
        longest_of: longest segment by the borders of graphs, for the tower's attention.

    Attributes:
        pixel_bytes: memory per pixel of an eager batch of the largest size.
    """

    def __init__(
        self,
        visual: Any,
        longest_of: MutableMapping[Tensor, int],
        device: Device,
        graphs: GraphRunner,
        dtype: torch.dtype,
        sizes: Sequence[int],
    ) -> None:
        self._visual, self._device, self._graphs, self._sizes = visual, device, graphs, sizes
        self._merge: int = visual.spatial_merge_size**2
        patches, most, target = visual.patch_embed, sizes[-1], device.torch_device
        width = patches.in_channels * patches.temporal_patch_size * patches.patch_size**2
        self._pixels = torch.zeros(most, width, dtype=dtype, device=target)
        smallest = torch.tensor([[1, visual.spatial_merge_size, visual.spatial_merge_size]])
        self._buffers = {
            name: torch.zeros(self._length(name, most), *one.shape[1:], dtype=one.dtype, device=target)
            for name, one in size_tensors(visual, smallest).items()
        }
        self._arguments: dict[int, dict[str, Any]] = {}
        in_use = device.reset_peak_memory()
        for size in reversed(sizes):  # the largest first: the others reuse its memory pool
            arguments: dict[str, Any] = {
                name: buffer[: self._length(name, size)] for name, buffer in self._buffers.items()
            }
            self._arguments[size] = arguments
            for name in LONGEST.keys() & arguments.keys():
                longest = size
                if name == "cu_window_seqlens":
                    longest = min((visual.window_size // visual.patch_size) ** 2, size)
                longest_of[arguments[name]] = longest
                arguments[LONGEST[name]] = longest
            graphs.capture(size, partial(self._step, size))
        self.pixel_bytes = (device.peak_memory() - in_use) / (most * patches.patch_size**2)

    def run(self, pixels: Tensor, tensors: dict[str, Tensor]) -> Tensor | None:
        """Encode a batch: return [tokens, width] with concatenated deepstack levels; None if it fits no graph.

        Args:
            pixels: [patches, width of a patch], on the host. tensors: :func:`size_tensors` of its images.
        """
        size = next((size for size in self._sizes if self._fits(size, len(pixels), tensors)), None)
        if size is None:
            return None
        self._fill(self._pixels, pixels)
        for name, tensor in tensors.items():
            missing = self._length(name, size) - len(tensor)
            if name in LONGEST:  # empty segments
                tensor = torch.cat((tensor, tensor[-1:].expand(missing)))
            elif name == "window_index":  # identity permutation for padding
                tensor = torch.cat((tensor, torch.arange(len(tensor), len(tensor) + missing)))
            self._fill(self._buffers[name], tensor)
        return self._graphs.replay(size)[: len(pixels) // self._merge].clone()

    def _fits(self, size: int, num_patches: int, tensors: dict[str, Tensor]) -> bool:
        borders = LONGEST.keys() & tensors.keys()
        return num_patches <= size and all(len(tensors[name]) <= self._length(name, size) for name in borders)

    def _length(self, name: str, size: int) -> int:
        """Return the rows of an argument for ``size`` patches."""
        if name in LONGEST:
            return size // _LEAST_PATCHES[name] + 2
        return size // self._merge if name == "window_index" else size

    def _fill(self, buffer: Tensor, values: Tensor) -> None:
        buffer[: len(values)].copy_(self._device.pin_memory(values), non_blocking=True)

    def _step(self, size: int) -> Tensor:
        output = self._visual(self._pixels[:size], grid_thw=None, **self._arguments[size])
        levels = getattr(output, "deepstack_features", None) or ()
        return torch.cat((output.pooler_output, *levels), dim=-1)
