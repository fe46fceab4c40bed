"""The three top-level packages are ours alone: another distribution with a ``device`` would shadow ours."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["device", "epd_serve", "proxy"])
def test_each_top_level_name_belongs_to_this_distribution(name: str) -> None:
    owners = [
        distribution.name
        for distribution in metadata.distributions()
        if name in (distribution.read_text("top_level.txt") or "").split()
    ]
    assert set(owners) == {"epd-serve"}
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").exists()


def test_the_base_install_asks_for_no_torch() -> None:
    requirements = metadata.requires("epd-serve") or []
    base = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert base
    assert not [requirement for requirement in base if requirement.startswith(("torch", "transformers", "numpy"))]
