"""Headers of safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DOWNLOAD_AGAIN = "download the file again, or run 'git lfs pull' there"


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file starts, and its tensors. Raises ValueError if it is broken.

    The header is 8 bytes of length, then JSON. The library would import numpy.
    """
    try:
        with file.open("rb") as content:
            start = 8 + int.from_bytes(content.read(8), "little")
            end = os.fstat(content.fileno()).st_size
            if start > end:
                raise ValueError("its header is cut off")
            tensors = json.loads(content.read(start - 8))
        tensors.pop("__metadata__", None)
        if start + max((one["data_offsets"][1] for one in tensors.values()), default=0) != end:
            raise ValueError("its weights are cut off")
        return start, tensors
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file}: {error}; weights are read from safetensors files alone; {DOWNLOAD_AGAIN}"
        ) from error
