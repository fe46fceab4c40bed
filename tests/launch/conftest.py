import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
from own_ports import free_port
from program import is_alive

from epd_serve.launch import native
from epd_serve.launch.processes import forking
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.protocol.addresses import url_of

FAKE_PROGRAM = Path(__file__).parent / "fake_program.py"


@dataclass(frozen=True)
class Fakes:
    """The fake processes of a test."""

    folder: Path

    def spec(
        self,
        name: str,
        behaviour: str = "",
        *,
        stops: Literal["first", "then", "last"] = "then",
        can_fork: bool = False,
    ) -> ProcessSpec:
        port = free_port("127.0.0.1")
        program = ("-P", "-m", FAKE_PROGRAM.stem) if can_fork else (str(FAKE_PROGRAM),)
        command = (sys.executable, *program, "instance", "--name", name, "--port", str(port))
        return ProcessSpec(
            name=name,
            label="fake",
            command=command,
            environment={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(FAKE_PROGRAM.parent), os.environ.get("PYTHONPATH", ""))),
                "FAKE_DIR": str(self.folder),
                f"FAKE_{name.upper()}": behaviour,
            },
            url=url_of("127.0.0.1", port),
            stops=stops,
            can_fork=can_fork,
        )

    @property
    def pids(self) -> dict[str, int]:
        """The ids of the processes that have started, by name."""
        written = {file.stem: file.read_text() for file in self.folder.glob("*.pid")}
        return {name: int(pid) for name, pid in written.items() if pid}

    @property
    def alive(self) -> set[str]:
        """Names of the started processes that still run."""
        return {name for name, pid in self.pids.items() if is_alive(pid)}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short name: names of Unix sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    """Fake processes; those that a failed test left running are ended."""
    fakes = Fakes(tmp_path / "fake")
    fakes.folder.mkdir()
    yield fakes
    for name in fakes.alive:
        psutil.Process(fakes.pids[name]).kill()


@pytest.fixture
def fake_program(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake processes in place of those of a deployment."""
    monkeypatch.setattr(native, "PROGRAM", (sys.executable, str(FAKE_PROGRAM)))
    for module in (native, forking):
        monkeypatch.setattr(module, "can_fork", lambda config, devices: False)
    monkeypatch.setenv("FAKE_DIR", str(fakes.folder))
