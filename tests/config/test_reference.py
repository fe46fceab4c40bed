"""Every option is written once, with all that is said of it; the pages and the schema are made from that."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from epd_serve.config import DeploymentConfig
from epd_serve.config.sections import Section

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load()
OPTIONS = {path: field for path, _, _, field in generate.options_of(DeploymentConfig)}


@pytest.mark.parametrize("path", ["docs/reference/options.md", "docs/reference/cli.md", "deploy/schema.json"])
def test_what_is_made_from_them_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == generate.pages()[path], "run: python docs/generate.py"


def test_a_section_is_no_option() -> None:
    assert all(
        generate.section_of(field.annotation) is None or "api_keys" in path or path == "model"
        for path, field in OPTIONS.items()
    )
    assert issubclass(generate.section_of(OPTIONS["gateway.api_keys"].annotation), Section)
