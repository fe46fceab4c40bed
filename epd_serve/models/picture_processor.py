"""Pictures of families that transformers prepares with torchvision alone, in torch's own operators.

The results are the same to the bit: a resize of uint8 pixels, one subtraction and one division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers.image_processing_base import ImageProcessingMixin

from epd_serve.models.family import Size, names

#: Fields of a processor's file that change nothing, or nothing here.
_SILENT = names(
    "image_processor_type processor_class data_format input_data_format return_tensors device default_to_square",
    "do_convert_rgb model_input_names auto_map disable_grouping do_center_crop crop_size pad_size",
    "image_seq_length max_num_patches return_row_col_info",
    # of a feature extractor, where one file is for pictures and sounds
    "feature_extractor_type feature_size sampling_rate padding_side padding_value return_attention_mask",
    "audio_samples_per_token",
)
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_pad")
_BILINEAR = 2


@dataclass(frozen=True, slots=True)
class PictureProcessor:
    """The fields of a processor's file, with those that it leaves out."""

    fields: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, **defaults: Any) -> PictureProcessor:
        """Read the processor of a checkpoint. Raises ValueError for a field that is not among the defaults.

        Args:
            defaults: what transformers' class has where the file says nothing.
        """
        given, _ = ImageProcessingMixin.get_image_processor_dict(path, local_files_only=True)
        steps = {**dict.fromkeys(_STEPS, True), "resample": _BILINEAR}
        steps |= {name: value for name, value in defaults.items() if name in steps}
        fields = {"rescale_factor": 1 / 255, **defaults}
        for name, value in given.items():
            if name in steps:
                if value not in (None, steps[name]):
                    raise ValueError(f"preprocessor_config.json has {name}: {value!r}, which is not supported")
            elif name in fields:
                fields[name] = fields[name] if value is None else value
            elif name not in _SILENT:
                raise ValueError(f"preprocessor_config.json has {name}: {value!r}, which is not known")
        return cls(fields)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__slots__ or name not in self.fields:
            raise AttributeError(name)
        return self.fields[name]

    @staticmethod
    def resized(pixels: NDArray[np.uint8], size: Size) -> Tensor:
        """RGB [height, width, 3] → uint8 [3, height, width] of another size."""
        tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
        width, height = size
        if tensor.shape[2:] == (height, width):
            return tensor[0]
        return F.interpolate(tensor, (height, width), mode="bilinear", antialias=True)[0]

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [3, height, width] → float32."""
        mean, std = (torch.tensor(values) * (1.0 / self.rescale_factor) for values in self._mean_and_std)
        return pixels.to(torch.float32).sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))

    def normalised_coarsely(self, pixels: Tensor) -> Tensor:
        """uint8 [3, height, width] → bfloat16, in which all is computed."""
        mean, std = (torch.tensor(values, dtype=torch.bfloat16) for values in self._mean_and_std)
        scale: float = self.rescale_factor
        return (pixels.to(torch.bfloat16) * scale).sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))

    @property
    def _mean_and_std(self) -> tuple[list[float], list[float]]:
        return list(self.image_mean), list(self.image_std)


def tiles(pixels: Tensor, rows: int, columns: int) -> Tensor:
    """[3, rows * height, columns * width] → [rows * columns, 3, height, width], row by row."""
    _, height, width = pixels.shape
    parts = pixels.reshape(3, rows, height // rows, columns, width // columns)
    return parts.permute(1, 3, 0, 2, 4).flatten(0, 1)
