"""Sources of requests for ``epd-serve bench``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from epd_serve.bench.types import Media, Workload
from epd_serve.bench.workloads.files import Custom, Trace
from epd_serve.bench.workloads.notation import Options, Size, split_spec
from epd_serve.bench.workloads.synthetic import PRESETS, Synthetic

__all__ = ["load_workload"]

_FROM_FILE: dict[str, Callable[[Path, Options], Workload]] = {"custom": Custom, "trace": Trace}


def load_workload(spec: str, draw_picture: Callable[[Size, Random], Media] | None = None) -> Workload:
    """Return the workload written as ``NAME[:FILE][,KEY=VALUE...]``, such as ``synthetic,images=2,turns=1..4``.

    Args:
        draw_picture: replaces the generator of pictures, which is slow.

    Raises ValueError for an unknown name or setting, and for an invalid file.
    """
    name, file, options = split_spec(spec)
    if name in PRESETS:
        if file is not None:
            raise ValueError(f"workload {name} reads no file; write {name},KEY=VALUE for its settings")
        return Synthetic(name, options, draw_picture)
    if name not in _FROM_FILE:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join((*PRESETS, *_FROM_FILE))}")
    if file is None:
        raise ValueError(f"workload {name} needs a file; write {name}:FILE.jsonl")
    return _FROM_FILE[name](file, options)
