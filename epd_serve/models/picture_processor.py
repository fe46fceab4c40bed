"""Pictures of families that transformers prepares with torchvision alone, in torch's own operators.

The results are the same to the bit: a resize of uint8 pixels, one subtraction and one division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.image_processing_base import ImageProcessingMixin

from epd_serve.models.family import names

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
