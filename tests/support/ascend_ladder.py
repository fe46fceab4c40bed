"""Common to the levels of tests/ascend: getting torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest

COMMAND = "python tests/ascend/ladder.py"


def require_torch_npu() -> None:
    """Import torch_npu, or skip the calling module with the command that brings it."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip(f"torch_npu is not importable here; run: {COMMAND}", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch_npu")
