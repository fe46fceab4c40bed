"""The part of torchvision that transformers' image processors call, in torch's operators, for those that need it.

Where torchvision is at hand, ``tests/models/test_picture_processor.py`` holds them against it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import image_processing_backends, video_processing_utils

#: Families whose image processors want torchvision, and their class.
TORCHVISION_ALONE = {
    "gemma4_unified": "Gemma4UnifiedImageProcessor",
}


class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


#: By PIL's numbers.
_MODES = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}


def _resize(image: Tensor, size: Sequence[int], interpolation: Any, antialias: bool) -> Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    batch = image.reshape(-1, *image.shape[-3:])
    mode = _MODES.get(interpolation, interpolation).value
    resized = F.interpolate(batch, tuple(map(int, size)), mode=mode, antialias=antialias)
    return resized.reshape(*image.shape[:-2], *resized.shape[-2:])


def _pad(image: Tensor, padding: Sequence[int], fill: Sequence[int]) -> Tensor:
    assert not any(fill)
    left, top, right, bottom = map(int, padding)
    return F.pad(image, (left, right, top, bottom))


def _normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    mean, std = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    return (image - mean) / std


def _grayscale_to_rgb(image: Tensor) -> Tensor:
    assert image.shape[-3] == 3
    return image


@contextmanager
def _standing_in() -> Iterator[None]:
    functional: Any = ModuleType("torchvision.transforms.v2.functional")
    functional.InterpolationMode = InterpolationMode
    functional.resize, functional.pad, functional.normalize = _resize, _pad, _normalize
    modules = {f"torchvision{name}": ModuleType("") for name in ("", ".transforms", ".transforms.v2")}
    for name in modules:
        modules[name].__path__ = []
    modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {**modules, "torchvision.transforms.v2.functional": functional}):
        functional.grayscale_to_rgb = _grayscale_to_rgb
        image_processing_backends.tvF = video_processing_utils.tvF = functional
        image_processing_backends.pil_torch_interpolation_mapping = _MODES
        yield


def image_processor_of(path: Path, model_type: str) -> Any:
    """transformers' image processor of a checkpoint of these families."""
    with _standing_in():
        module = importlib.import_module(f"transformers.models.{model_type}.image_processing_{model_type}")
    return getattr(module, TORCHVISION_ALONE[model_type]).from_pretrained(path)


def video_processor_of(path: Path, model_type: str) -> Any:
    """transformers' video processor of a checkpoint."""
    with _standing_in(), mock.patch("transformers.utils.import_utils.is_torchvision_available", lambda: True):
        module = importlib.import_module(f"transformers.models.{model_type}.video_processing_{model_type}")
        names = [name for name in module.__all__ if name.endswith("VideoProcessor")]
        return getattr(module, names[0]).from_pretrained(path)


def run_beside_torchvision(directory: str, program: str) -> None:
    """Run code that imports a module of tests/models, in a process that finds torchvision in ``directory``."""
    tests = str(Path(__file__).parents[1] / "models")
    supports = [str(one) for one in sys.path if "support" in str(one)]
    whole = (
        f"import sys; sys.path[:0] = [{directory!r}, {tests!r}]; sys.path += {supports!r}\n"
        "import torch\n"
        # torchvision's wheels are for CUDA: its own operators do not load, and none of them is needed
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "library.define('qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        f"{program}print('compared')\n"
    )
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.endswith("compared\n"), done.stdout + done.stderr
