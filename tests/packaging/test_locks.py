"""The lock files say what pyproject.toml and constraints.txt say, with hashes, and name no index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("base", "docs")
STALE = "run: python requirements/lock.py (see CONTRIBUTING.md)"


def pins(text: str) -> dict[str, str]:
    """Canonical name → version of the lines ``name==version``."""
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_current_and_every_entry_has_hashes_and_no_address(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    locked, constrained = pins(text), pins((ROOT / "constraints.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # the site is built without this project
    wanted = project["optional-dependencies"]["docs"] if name == "docs" else project["dependencies"]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None and version in requirement.specifier, f"{requirement}: {STALE}"
    assert {
        name: version for name, version in locked.items() if constrained.get(name, version) != version
    } == {}, STALE
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert not re.search(r"://|--(extra-)?index|--find-links", text)


def test_the_oldest_msgspec_that_is_accepted_raises_value_errors() -> None:
    """Bad bytes of peers are handled as ValueErrors, which msgspec's errors are since 0.21."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [msgspec] = [one for one in map(Requirement, project["dependencies"]) if one.name == "msgspec"]
    assert not msgspec.specifier.contains("0.20.0")
    assert msgspec.specifier.contains("0.21.0")
