"""Writes the lock files beside this one: what CI installs, at the versions of constraints.txt and tested.txt.

    python requirements/lock.py        # needs uv; asks the package index that it is set up with

``pip install --require-hashes -r requirements/base.lock`` installs what the gateway needs, ``docs.lock`` what
builds the site; ``pip install --no-deps --no-build-isolation .`` follows. The locks have the hashes of every file
that the index offers for a version, so that they serve all platforms and Pythons.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOCKS = ("base", "docs")
PINS = ("--constraints", "constraints.txt", "--constraints", "requirements/tested.txt")
_ENTRY = re.compile(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", re.MULTILINE | re.DOTALL)


class Package(NamedTuple):
    """An entry of a lock."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def packages(name: str) -> list[Package]:
    """Those of ``requirements/NAME.lock``, in its order."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return [
        Package(*head, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)))
        for entry in _ENTRY.findall(text)
        for head in re.findall(r"^([\w.-]+)==([^\s;\\]+)(?: ; (.*?))? \\$", entry, re.MULTILINE)
    ]


def compile_lock(source: str, *options: str, given: str | None = None) -> str:
    """The lock that uv writes for a requirements file, without the comments that name machines."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--universal", "--python-version", "3.11"]
    command += ["--no-header", "--no-annotate", *PINS, *options, source]
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def site_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"]["docs"])


def main() -> None:
    if shutil.which("uv") is None:
        raise SystemExit("uv is not installed; run: pip install uv")
    for name in LOCKS:
        if name == "docs":  # the site is built without this project
            lock = compile_lock("-", given="\n".join(site_requirements()))
        else:
            lock = compile_lock("pyproject.toml", "requirements/build.in")
        header = (
            "# Written by requirements/lock.py from pyproject.toml, constraints.txt and tested.txt; do not edit.\n"
        )
        (ROOT / "requirements" / f"{name}.lock").write_text(header + lock)
        print(f"requirements/{name}.lock: {len(_ENTRY.findall(lock))} packages")


if __name__ == "__main__":
    main()
