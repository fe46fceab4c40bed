"""Fixtures with real vLLM processes; one deployment runs at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model
from vllm_runs import Tokens, ask_all, engine_python, monolith, questions


@pytest.fixture(scope="session")
def python() -> str:
    found = engine_python()
    if found is None:
        pytest.skip("EPD_SERVE_VLLM_PYTHON names no Python that has vLLM")
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="session")
def asked() -> list[dict[str, Any]]:
    return questions()


@pytest.fixture(scope="session")
def expected(
    python: str, model: Path, asked: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[Tokens]:
    """The answers of vLLM alone."""
    with monolith(python, model, tmp_path_factory.mktemp("monolith") / "log") as url:
        return ask_all(url, asked)
