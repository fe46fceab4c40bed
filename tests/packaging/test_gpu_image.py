"""``python -m benchmarks.gpu`` in an image that has torch and transformers, and little else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PYTEST, WHEELS

ROOT = Path(__file__).parents[2]
PLAIN = [
    "torch",
    "torchvision",
    "triton",
    "transformers",
    "pytest",
    "hypothesis",
    "numpy",
    "pillow",
    "typer",
    "uvloop",
    "xxhash",
]
#: Hides what neither these distributions are nor what they need, and runs the code that follows.
IMAGE = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement
allowed, waiting = set(), json.loads(sys.argv[1])
while waiting:
    name = waiting.pop().lower().replace("_", "-")
    if name in allowed:
        continue
    allowed.add(name)
    try:
        wanted = map(Requirement, metadata.requires(name) or [])
    except metadata.PackageNotFoundError:
        continue
    waiting += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
hidden = json.loads(sys.argv[2])
allowed -= set(hidden)
packages = {
    package: {name.lower().replace("_", "-") for name in names}
    for package, names in metadata.packages_distributions().items()
}
class Image:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        names = {"ruamel.yaml"} if name.startswith("ruamel.yaml") else packages.get(top, set())
        if names and not names & allowed and top not in ("benchmarks", "device", "epd_serve", "proxy", "ruamel"):
            raise ModuleNotFoundError(f"the image has no {name}", name=name)
        if name == "ruamel.yaml" and "ruamel.yaml" not in allowed:
            raise ModuleNotFoundError(f"the image has no {name}", name=name)
sys.meta_path.insert(0, Image())
sys.path.insert(0, "tests/support")
"""


def run(code: str, *, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in an image with these wheels, but for the hidden ones."""
    there = json.dumps([*PLAIN, *WHEELS])
    command = [sys.executable, "-c", IMAGE + code, there, json.dumps(hidden)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300)


def test_it_says_which_wheels_it_lacks() -> None:
    done = run(
        "sys.argv[1:] = ['--output', 'none.json']\nfrom benchmarks.gpu import main\nsys.exit(main())",
        hidden=WHEELS,
    )
    assert done.returncode == 2, done.stderr
    assert f"lacks {', '.join(WHEELS)}. Where there is a network: pip download -d wheels blake3" in done.stderr


@pytest.mark.slow
def test_with_them_all_of_it_runs() -> None:
    parts = "colocation, engine_gpu, gpu, gpu_kernels, gpu_timing, handoff"
    done = run(f"from benchmarks import {parts}")
    assert done.returncode == 0, done.stderr
    options = ["tests/device", *PYTEST, "-m", "not slow", "-k", "registry"]
    done = run(
        f"import os, pytest\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\nsys.exit(pytest.main({options}))"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
