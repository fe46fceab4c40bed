"""README's install lines, and every hint on what to install, are commands that work from a clone."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

specification = importlib.util.spec_from_file_location("resolve", ROOT / "requirements" / "resolve.py")
assert specification is not None and specification.loader is not None
resolve = importlib.util.module_from_spec(specification)
specification.loader.exec_module(resolve)


CPU_BUILDS = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def test_readme_has_a_command_for_users_and_one_for_development() -> None:
    """Each is one line that can be copied: the environment, the packages, what they are for."""
    run, test = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert run.endswith(" && epd-serve up") and test.endswith(" && pytest")
    assert resolve.install_lines(README) == [
        [*CPU_BUILDS, "-c", "constraints.txt", ".[native]"],
        [*CPU_BUILDS, "-c", "constraints.txt", "-e", ".[native,dev]"],
    ]


def requirements(*extras: str) -> set[str]:
    """Names of the distributions that the base and these extras ask for."""
    found = {Requirement(line) for line in PROJECT["dependencies"]}
    for extra in extras:
        found |= {Requirement(line) for line in PROJECT["optional-dependencies"][extra]}
    own = [one for one in found if one.name == "epd-serve"]
    return {one.name for one in found} - {"epd-serve"} | {
        name for one in own for name in requirements(*one.extras)
    }


@pytest.mark.parametrize("name", ["device", "epd_serve", "proxy"])
def test_each_top_level_package_is_ours_alone(name: str) -> None:
    """Another distribution with a ``device`` would shadow ours."""
    top_level = {one.name: one.read_text("top_level.txt") or "" for one in metadata.distributions()}
    assert {owner for owner, names in top_level.items() if name in names.split()} == {"epd-serve"}
    assert (ROOT / name / "py.typed").exists()


def test_the_base_install_asks_for_no_torch() -> None:
    assert requirements() and requirements().isdisjoint({"torch", "transformers", "numpy"})


def test_every_pin_is_one_that_the_requirements_admit() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["native"], *extras["dev"], *extras["media"]]
    for requirement in map(Requirement, wanted):
        if (version := versions.get(canonicalize_name(requirement.name))) is not None:
            assert version in requirement.specifier, requirement
