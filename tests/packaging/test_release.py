"""A release: a wheel and an sdist, built from a clean clone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from own_ports import free_port
from program import read_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(clone)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dist


def test_one_version_is_released() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    labels = re.findall(r"image\.version=(\S+)", (ROOT / "deploy/Dockerfile").read_text())
    newest = re.search(r"^## (\S+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert {version, newest[1]} == set(labels)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (again,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_installed_wheel_serves(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    subprocess.run([environment / "bin/pip", "install", "--quiet", "--no-deps", wheel], check=True)
    # Its dependencies are those of this environment. A path in a .pth file does not bring the .pth files there, so
    # this project's own editable installation stays out.
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    port = free_port("127.0.0.1")
    with subprocess.Popen(
        [environment / "bin/epd-serve", "up", "--port", str(port)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as up:
        try:
            read_until(up, "chat/completions")
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps({"model": "demo", **body}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] > 0
            where = "import epd_serve, proxy, device; print(epd_serve.__file__, proxy.__file__, device.__file__)"
            printed = subprocess.check_output([environment / "bin/python", "-c", where], cwd=tmp_path, text=True)
            assert all(Path(name).is_relative_to(environment) for name in printed.split())
        finally:
            up.terminate()
            up.communicate(timeout=60)
    assert up.returncode == 0
