"""Imports epd-serve's connectors beside vllm-ascend; run by vLLM's Python. Answers why each does not load."""

from __future__ import annotations

import importlib
import json
import sys


def fault(module: str) -> str:
    try:
        importlib.import_module(f"epd_serve.vllm_plugin.{module}")
    except ImportError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps({connector: fault(module) for connector, module in json.load(sys.stdin).items()}))
