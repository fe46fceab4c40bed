"""README's install lines, and every hint on what to install, are commands that work from a clone."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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


def texts() -> dict[str, str]:
    """Path → text of each file of the repository that people read."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    read = (".md", ".py", ".yaml", ".sh", ".toml", ".txt")
    return {
        path: (ROOT / path).read_text()
        for path in listed.split("\n")
        if path.endswith(read) and (ROOT / path).exists()
    }


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


#: Of extras that name other machines' packages; what imports them runs there.
ELSEWHERE = {"ray", "torch_npu", "vllm", "vllm_ascend"}
#: Libraries of the client table (benchmarks/clients.py), which skips those that are not installed.
CLIENTS = {
    "agents",
    "instructor",
    "langchain_core",
    "langchain_openai",
    "litellm",
    "pydantic_ai",
    "smolagents",
    "anthropic",
    "llama_index",
}
#: Come with transformers, each version with its own.
OF_TRANSFORMERS = {"huggingface_hub", "tokenizers"}
DISTRIBUTIONS = {"PIL": "pillow", "ruamel": "ruamel.yaml", "opentelemetry": "opentelemetry-sdk"}
DISTRIBUTIONS |= {"mooncake": "mooncake-transfer-engine-non-cuda"}


def imported(path: Path) -> Iterator[str]:
    """Top-level names of the modules that a file imports or skips without."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "importorskip"
        ):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        yield from (name.partition(".")[0] for name in names)


def test_the_extras_of_the_test_command_bring_all_that_tests_and_benchmarks_import() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    ours = {"epd_serve", "device", "proxy", "tests", "benchmarks", *(path.stem for path in files)}
    ours |= {path.parent.name for path in files}
    foreign = {name for path in files for name in imported(path)} - ours - {*sys.stdlib_module_names}
    brought = {canonicalize_name(name) for name in requirements("native", "dev")}
    lacking = foreign - ELSEWHERE - CLIENTS - OF_TRANSFORMERS
    assert {name for name in lacking if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in brought} == set()


def test_no_hint_takes_this_project_from_an_index() -> None:
    from_an_index = re.compile(r"pip install[^\n`&]*(?<!bin/)\bepd-serve\b(?!')")
    found = {path for path, text in texts().items() if from_an_index.search(text) and "packaging" not in path}
    assert found == set()


def test_each_extra_that_is_named_is_there() -> None:
    for path, text in texts().items():
        for extras in re.findall(r"pip install[^\n`]*'\\?\.\\?\[([a-z,-]+)\\?\]'", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path


def test_every_pin_is_one_that_the_requirements_admit() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["native"], *extras["dev"], *extras["media"]]
    for requirement in map(Requirement, wanted):
        if (version := versions.get(canonicalize_name(requirement.name))) is not None:
            assert version in requirement.specifier, requirement
