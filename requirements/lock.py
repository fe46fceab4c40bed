"""Writes the lock files beside this one: what CI installs, at the versions of constraints.txt and tested.txt.

    python requirements/lock.py        # needs uv; asks the package index that it is set up with

``pip install --require-hashes -r requirements/base.lock`` installs what the gateway needs, ``full.lock`` what
instances and development need besides, ``docs.lock`` what builds the site; ``pip install --no-deps
--no-build-isolation .`` follows. The locks have the hashes of every file that the index offers for a version, so
that they serve all platforms and Pythons.

On Linux with x86-64, full.lock wants torch's CPU wheel ("2.13.0+cpu"), which pip must find (``--find-links``, or
an index that has it): the CUDA wheel asks for libraries that the lock leaves out. This script is told where the
CPU wheel lies in the same way: ``python requirements/lock.py --find-links DIRECTORY``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOCKS = {
    "base": (),
    "full": ("native", "media", "dev", "mooncake-cpu", "otel", "bench", "plan"),
    "docs": ("docs",),
}
PINS = ("--constraints", "constraints.txt", "--constraints", "requirements/tested.txt")
_ENTRY = re.compile(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", re.MULTILINE | re.DOTALL)
_CPU_WHEEL = "sys_platform == 'linux' and platform_machine == 'x86_64'"
_NO_CPU_WHEEL = "sys_platform != 'linux' or platform_machine != 'x86_64'"


class Package(NamedTuple):
    """An entry of a lock; ``version`` may have a local part, as in 2.13.0+cpu."""

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


def with_every_torch(lock: str) -> str:
    """The lock with a second entry for torch, as the index has it, where the CPU wheel is not for the platform."""
    match = re.search(r"^(torch==([0-9.]+)\+cpu)(.*?)(?=^[A-Za-z0-9])", lock, re.MULTILINE | re.DOTALL)
    if match is None:
        raise SystemExit("torch's CPU wheel was not found; say with --find-links where it lies")
    public = compile_lock("-", "--no-deps", given=f"torch=={match[2]}\n")
    cpu = f"{match[1]} ; {_CPU_WHEEL}{match[3]}"
    other = re.sub(r"^torch==\S+", rf"\g<0> ; {_NO_CPU_WHEEL}", public, flags=re.MULTILINE)
    return lock[: match.start()] + cpu + other + lock[match.end() :]


def site_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"]["docs"])


def main() -> None:
    if shutil.which("uv") is None:
        raise SystemExit("uv is not installed; run: pip install uv")
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("--find-links", action="append", default=[], help="Where torch's CPU wheel lies.")
    find_links = [part for place in parser.parse_args().find_links for part in ("--find-links", place)]
    for name, extras in LOCKS.items():
        if name == "docs":  # the site is built without this project
            lock = compile_lock("-", given="\n".join(site_requirements()))
        else:
            options = [*(part for extra in extras for part in ("--extra", extra)), *find_links]
            lock = compile_lock("pyproject.toml", *options, "requirements/build.in")
        if "native" in extras:
            lock = with_every_torch(lock)
        header = (
            "# Written by requirements/lock.py from pyproject.toml, constraints.txt and tested.txt; do not edit.\n"
        )
        (ROOT / "requirements" / f"{name}.lock").write_text(header + lock)
        print(f"requirements/{name}.lock: {len(_ENTRY.findall(lock))} packages")


if __name__ == "__main__":
    main()
