"""README's install lines, and every hint on what to install, are commands that work from a clone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

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


def test_readme_has_a_line_for_users_and_one_for_development() -> None:
    lines = resolve.install_lines(README)
    assert ["-c", "constraints.txt", ".[native]"] in lines
    assert ["-c", "constraints.txt", "-e", ".[native,dev]"] in lines


def test_the_line_for_a_cpu_comes_before_the_first_install() -> None:
    commands = re.findall(r"\.venv/bin/pip install .*", README)
    assert commands[0].endswith("torch --index-url https://download.pytorch.org/whl/cpu")


def test_no_hint_takes_this_project_from_an_index() -> None:
    from_an_index = re.compile(r"pip install[^\n`]*(?<!bin/)\bepd-serve\b(?!')")
    found = {path for path, text in texts().items() if from_an_index.search(text) and "packaging" not in path}
    assert found == set()


def test_each_extra_that_is_named_is_there() -> None:
    for path, text in texts().items():
        for extras in re.findall(r"pip install[^\n`]*'\\?\.\\?\[([a-z,-]+)\\?\]'", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path


def test_a_torch_that_is_there_fits_the_pins() -> None:
    """Torch is not pinned, nor is what it pins itself: torch 2.13 wants triton 3.7.1, 2.15 wants 3.9.0."""
    pinned = {
        Requirement(line).name for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"
    }
    assert not {
        name
        for name in pinned
        if re.match(r"(torch|torchvision|torch_npu|triton|setuptools|nvidia-.*|cuda-.*)$", name)
    }


def test_a_bare_pip_keeps_the_way_to_the_index_and_nothing_else() -> None:
    settings = (
        ":env:.find-links='/wheels'\nglobal.cert='/certificates.crt'\nglobal.extra-index-url='file:///more'\n"
    )
    environment = resolve.bare({"PATH": "/bin", "PIP_FIND_LINKS": "/wheels", "PIP_TIMEOUT": "9"}, settings)
    assert environment == {
        "PATH": "/bin",
        "PIP_CERT": "/certificates.crt",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
