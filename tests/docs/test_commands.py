"""The commands of README and docs/guide work as they are written.

Blocks in ``sh`` and ``python`` run one after the other, page by page, beside one deployment of the demo model;
port 8000 becomes that deployment's, and ``epd-serve up`` a dry run. Blocks in ``yaml`` are deployment files. A
comment above a block says more: ``needs: ...`` is not run, ``slow`` runs with ``-m slow``, ``file: NAME`` is a
file for the commands that follow. Whatever the comment, each ``epd-serve`` command must parse.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from own_ports import free_port
from program import wait_until

from epd_serve.cli.app import app
from epd_serve.config import parse_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LIMIT_S = 200.0

specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert specification is not None and specification.loader is not None
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)
COMMANDS: dict[str, Any] = dict(generate.commands(typer.main.get_command(app), "epd-serve"))


@pytest.mark.parametrize("path", ["docs/reference/options.md", "docs/reference/cli.md", "deploy/schema.json"])
def test_generated_pages_are_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == generate.pages()[path], "run: python docs/generate.py"


@dataclass(frozen=True, kw_only=True)
class Block:
    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(mark=match["mark"] or "", language=match["language"], text=match["text"])
        for match in FENCE.finditer(page.read_text())
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each ``epd-serve`` command in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" <<<")[0], comments=True)
        if "epd-serve" in words:
            words = words[words.index("epd-serve") :]
            ends = [at for at, word in enumerate(words) if word in ("|", "&&", ";")]
            yield words[: ends[0]] if ends else words


def parse(words: Sequence[str]) -> None:
    """Raises where the command line is wrong."""
    for length in (3, 2):
        if (command := COMMANDS.get(" ".join(words[:length]))) is not None:
            command.make_context(words[1], list(words[length:]))
            return
    assert list(words[1:]) in ([], ["--version"], ["--help"]), f"there is no command {shlex.join(words)}"


def name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_parses_and_every_deployment_file_is_right(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("sh", "python", "yaml", "json", "text"), f"{page.name}: {block}"
        assert re.fullmatch(r"|slow|needs: \w+|file: [\w.]+", block.mark), f"{page.name}: {block.mark}"
        for words in commands(block.text) if block.language == "sh" else ():
            parse(words)
        if block.language == "yaml" and not block.mark.startswith("file"):
            parse_config(block.text)
    for span in re.findall(r"`(epd-serve [^`]*)`", FENCE.sub("", page.read_text())):
        try:
            parse(shlex.split(span))
        except Exception as error:  # typer keeps its classes of errors to itself
            if type(error).__name__ != "MissingParameter":  # the text names a command and leaves out what it needs
                raise


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A folder that looks like a clone, beside a running deployment."""

    folder: Path
    environment: dict[str, str]
    port: int

    def run(self, page: Path, mark: str) -> None:
        for block in blocks(page):
            if block.mark.startswith("file: "):
                (self.folder / block.mark.removeprefix("file: ")).write_text(block.text)
            if block.language not in ("sh", "python") or block.mark != mark:
                continue
            text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
            text = re.sub(r"^(epd-serve up\b[^#\n]*?)(?: --dry-run)?$", r"\1 --dry-run", text, flags=re.MULTILINE)
            program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
            done = subprocess.run(
                [*program, text],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip(), f"{page.name}: nothing was printed by\n{text}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    for name in ("benchmarks", "deploy", "docs"):
        (folder / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "EPD_SERVE_LOG_DIR": str(folder / "logs"),
        "OMP_NUM_THREADS": "1",
    }
    port = free_port("127.0.0.1")
    command = ["epd-serve", "up", "--port", str(port)]
    output = folder / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file) as up,
    ):
        try:
            wait_until(lambda: "\nReady: " in output.read_text() or up.poll() is not None, "it is ready", LIMIT_S)
            assert up.poll() is None, output.read_text()
            yield Desk(folder=folder, environment=environment, port=port)
        finally:
            up.terminate()
    assert up.returncode == 0, output.read_text()


@pytest.mark.parametrize("mark", ["", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_run(desk: Desk, page: Path, mark: str) -> None:
    desk.run(page, mark)
