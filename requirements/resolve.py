"""Resolves README's set-up commands as a new user's pip does: no find-links, nothing installed.

    python requirements/resolve.py        # ends with 1 where a line cannot be installed

Each is resolved for the Python that runs this, with the pins and without them; the one with most extras for the
other Pythons, too. No wheel is downloaded as a whole (pip 26.3 reads the metadata alone). Of the machine's
configuration of pip remain the index and how it is reached: ``index-url``, ``cert``, ``proxy`` and the like.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PIP = "pip==26.3"
_REACHING_THE_INDEX = ("cert", "client-cert", "index-url", "proxy", "retries", "timeout", "trusted-host")
_RESOLVE = ("install", "--dry-run", "--ignore-installed", "--quiet", "--use-feature=fast-deps")


def install_lines(readme: str) -> list[list[str]]:
    """The arguments of ``pip install`` in each set-up command of README, without "install"."""
    commands = re.findall(r"^python3 -m venv .* && pip install (.*?) && ", readme, re.MULTILINE)
    return [shlex.split(command) for command in commands]


def bare(environment: dict[str, str], settings: str) -> dict[str, str]:
    """An environment in which pip knows no more than the index and how it is reached.

    Args:
        settings: the output of ``pip config list``, lines ``global.cert='FILE'``; the later ones win.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(("PIP_", "UV_"))}
    for name, value in re.findall(r"^[^.\n]*\.([a-z-]+)='(.*)'$", settings.replace(":env:", "env"), re.MULTILINE):
        if name in _REACHING_THE_INDEX:
            kept[f"PIP_{name.upper().replace('-', '_')}"] = value
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def main() -> None:
    lines = install_lines((ROOT / "README.md").read_text())
    if len(lines) != 2:
        raise SystemExit("README.md must have a set-up command for users and one for development")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        settings = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
        environment = bare(dict(os.environ), settings)
        subprocess.run([*pip, "install", "--quiet", PIP], env=environment, check=True)
        newest = [[part for part in line if part not in ("-c", "constraints.txt")] for line in lines]
        runs = {f"Python {here}: {shlex.join(line)}": line for line in lines + newest}
        widest = max(lines, key=lambda line: sum(part.count(",") for part in line))
        other = ["--only-binary=:all:", "--target", f"{folder}/none"]
        for python in PYTHONS:
            if python != here:
                runs[f"Python {python}: {shlex.join(widest)}"] = ["--python-version", python, *other, *widest]
        # An editable project cannot be had for another Python; what it needs is the same.
        commands = [[*pip, *_RESOLVE, *(part for part in line if part != "-e")] for line in runs.values()]

        def resolve(command: list[str]) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

        with ThreadPoolExecutor() as pool:
            outcomes = dict(zip(runs, pool.map(resolve, commands), strict=True))
    for name, done in outcomes.items():
        print(f"{name}: {'resolves' if done.returncode == 0 else 'DOES NOT RESOLVE'}")
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
    sys.exit(any(done.returncode for done in outcomes.values()))


if __name__ == "__main__":
    main()
