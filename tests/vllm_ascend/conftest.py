"""Fixtures with vllm-ascend's own code; see vllm_ascend_runs.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import make_tiny_model
from vllm_ascend_runs import Vendor, install


@pytest.fixture(scope="session")
def vendor_python() -> str:
    named = os.environ.get("EPD_SERVE_VLLM_ASCEND_PYTHON")
    if named is None:
        pytest.skip("EPD_SERVE_VLLM_ASCEND_PYTHON names no Python that has vllm-ascend")
    return named


@pytest.fixture(scope="session")
def vendor(vendor_python: str, tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    return install(vendor_python, tmp_path_factory.mktemp("vendor"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("vllm_ascend") / "tiny")
