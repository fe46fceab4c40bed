"""A finished run: its settings, records and figures, kept as run.json and records.jsonl."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import msgspec

from epd_serve.bench.summary import summarise
from epd_serve.bench.types import ClientLoad, Record, RunSettings, Summary, Totals


class _RunFile(msgspec.Struct, kw_only=True):
    settings: RunSettings
    tester: ClientLoad | None = None


@dataclass(kw_only=True)
class Run:
    """One workload at one load against one server.

    Attributes:
        path: its directory.
        records: sorted by index; fewer than planned if the run was interrupted.
        tester: None for a simulation.
    """

    path: Path
    settings: RunSettings
    records: Sequence[Record]
    tester: ClientLoad | None = None

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run. Raises ValueError if the directory contains none."""
        try:
            file = msgspec.json.decode((path / "run.json").read_bytes(), type=_RunFile)
            records = msgspec.json.Decoder(Record).decode_lines((path / "records.jsonl").read_bytes())
        except FileNotFoundError as error:
            raise ValueError(f"{path} is not a run: {error.filename} is missing") from None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is not a run: {error}") from error
        return cls(path=path, settings=file.settings, records=records, tester=file.tester)

    def write(self) -> None:
        """Write run.json and records.jsonl. Raises ValueError if the directory contains a run already."""
        if (self.path / "run.json").exists():
            raise ValueError(f"{self.path} already contains a run; choose another directory")
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "records.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(self.records))
        file = _RunFile(settings=self.settings, tester=self.tester)
        (self.path / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2))

    @property
    def is_complete(self) -> bool:
        return len(self.records) == self.settings.num_requests

    @cached_property
    def summary(self) -> Summary:
        """The figures. Raises ValueError without finished requests."""
        return summarise(self.settings, self.records, self.tester)

    @property
    def total(self) -> Totals:
        return self.summary.total

    @property
    def label(self) -> str:
        """The server's name in tables and plots: its label, topology or model."""
        settings = self.settings
        name = settings.label or settings.topology or settings.model
        return f"{name}, {settings.emulated}" if settings.emulated else name

    @property
    def workload_name(self) -> str:
        """The workload's name without its settings."""
        return self.records[0].workload if self.records else re.split(r"[,:]", self.settings.workload)[0]

    @property
    def rate(self) -> float | None:
        """Planned requests per second, for a trace the mean; None in a closed loop."""
        if self.settings.arrivals != "trace":
            return self.settings.rate
        return self.total.achieved_rate if self.total.planned_rate is None else self.total.planned_rate

    @property
    def load_text(self) -> str:
        """The load, such as "8 req/s" or "16 at once"."""
        if self.rate is not None:
            return f"{self.rate:.4g} req/s"
        return f"{self.settings.arrivals.removeprefix('closed:')} at once"


def read_runs(path: Path) -> list[Run]:
    """Read all runs below a directory, oldest first. Raises ValueError without any."""
    runs = [run for file in path.rglob("run.json") if (run := Run.read(file.parent)).records]
    if not runs:
        raise ValueError(f"{path} contains no run with finished requests")
    return sorted(runs, key=lambda run: run.settings.created_unix_s)


def new_directory(work_dir: Path) -> Path:
    """Create ``<work_dir>/<YYYYmmdd_HHMMSS>``, with a number appended if that exists. Raises ValueError."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for number in count(1):
        path = work_dir / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; choose another --work-dir") from error
        return path
    raise AssertionError
