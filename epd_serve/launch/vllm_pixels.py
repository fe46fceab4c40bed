"""Models whose files do not say how pixels are normalised.

transformers then has values of its own; vLLM, from 0.32 on, would leave the pixels as they are: other features.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

_FLAG = "mm_device_do_normalize"
_KEYS = ("do_normalize", "do_rescale", "image_mean", "image_std")


def pixel_flags(model: Path, flags: Collection[str]) -> dict[str, bool]:
    """Flags of vllm serve with which transformers normalises, where the model's files leave it to it.

    ``flags`` are those that the installed vLLM has.
    """
    image_processor = _read(model / "preprocessor_config.json")
    processor = _read(model / "processor_config.json").get("image_processor") or {}
    if _FLAG not in flags or not (image_processor or processor):
        return {}
    return {} if any(key in image_processor or key in processor for key in _KEYS) else {_FLAG: False}


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
