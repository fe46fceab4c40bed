"""Start a deployment file with ``epd-serve up`` for the length of a measurement."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from epd_serve.config import DeploymentConfig, change_config, load_config

_READY = re.compile(r"^Ready: (http://\S+)/v1 ", re.MULTILINE)
_READY_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A deployment to measure.

    Attributes:
        label: its topology, with the file's path if several have the same.
    """

    file: Path
    label: str
    config: DeploymentConfig

    @property
    def num_devices(self) -> int:
        """Distinct devices; a CPU that all instances share is one."""
        return len({device for instance in self.config.placement() for device in instance.devices})


def read_candidates(files: Sequence[Path]) -> list[Candidate]:
    """Read deployment files. Raises ValueError for an invalid or repeated file."""
    if twice := sorted({str(file) for file in files if files.count(file) > 1}):
        raise ValueError(f"--compare names {', '.join(twice)} twice")
    configs = [load_config(file) for file in files]
    lines = [str(config.topology) for config in configs]
    return [
        Candidate(
            file=file,
            label=line if lines.count(line) == 1 else f"{line} ({file.with_suffix('')})",
            config=config,
        )
        for file, line, config in zip(files, lines, configs, strict=True)
    ]


@contextmanager
def deployed(candidate: Candidate, log: Path) -> Iterator[str]:
    """Start a deployment and yield the URL of its gateway, on a free port of this machine.

    Raises ValueError with the end of its output if it does not start.
    """
    changes = {"gateway": {"host": "127.0.0.1", "port": 0}, "instances": {"base_port": 0}}
    config = change_config(candidate.config, changes)
    with tempfile.TemporaryDirectory(prefix="epd-serve-bench-") as folder:
        file = Path(folder) / candidate.file.name
        file.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "epd_serve.cli", "up", str(file)]
        tied = [sys.executable, "-m", "epd_serve.lifeline", str(os.getpid()), *command]
        with log.open("wb") as output:
            # in its own session, because Ctrl-C goes to the tester, which then stops the deployment in order
            process = subprocess.Popen(
                tied, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield _wait_ready(process, candidate, log)
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


def _wait_ready(process: subprocess.Popen[bytes], candidate: Candidate, log: Path) -> str:
    give_up = time.monotonic() + _READY_TIMEOUT_S
    while True:
        ended = process.poll() is not None
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := _READY.search(text):
            return found[1]
        if ended or time.monotonic() > give_up:
            tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
            raise ValueError(f"{candidate.file} did not start; the end of {log}:\n{tail}")
        time.sleep(_POLL_S)
