"""A run on disk. What is measured is appended and flushed at once, so that a killed run loses nothing but what was
under way, and can be resumed.

::

    run.json        RunSettings
    schedule.jsonl  {"index", "time_s"}: when each request is planned; null where answers decide
    records.jsonl   Record, one line per finished request
    stages.jsonl    {"index", "stages"}, as our gateway told
    metrics.jsonl   Sample
    segments.jsonl  Segment, at the begin and again at the end of each process's work
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from epd_serve.bench.types import Record, RunSettings, Sample, Segment, StageSpan

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


class _Planned(msgspec.Struct):
    index: int
    time_s: float | None


class Stages(msgspec.Struct):
    """The stages of a finished request, by its index; a line of stages.jsonl."""

    index: int
    stages: list[StageSpan]


#: The file of each kind of line that is appended.
_FILES: dict[type[msgspec.Struct], str] = {
    Record: "records.jsonl",
    Stages: "stages.jsonl",
    Sample: "metrics.jsonl",
    Segment: "segments.jsonl",
}


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Write a file in one piece: a reader sees all of the new content, or of the old."""
    half = path.with_name(f".{path.name}")
    half.write_bytes(msgspec.json.format(_encoder.encode(content), indent=2))
    half.replace(path)


def read_json(path: Path, kind: type[T]) -> T:
    """Raises ValueError where the file is missing or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is no {path.stem}: it has no {path.name}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path, settings: RunSettings) -> None:
        """Use :meth:`create` or :meth:`open`."""
        self.path = path
        self.settings = settings

    @classmethod
    def create(
        cls, path: Path, settings: RunSettings, schedule: Iterable[tuple[int, float | None]]
    ) -> RunDirectory:
        """Raises ValueError where ``path`` cannot be made or holds a run already."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "run.json").exists():
                raise ValueError(f"{path} holds a run already; go on with it by --resume {path}")
            lines = [_Planned(index, time_s) for index, time_s in schedule]
            (path / "schedule.jsonl").write_bytes(_encoder.encode_lines(lines))
            (path / "records.jsonl").touch()
            write_json(path / "run.json", settings)  # last: a directory with it is whole
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; choose another --work-dir") from error
        return cls(path, settings)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Raises ValueError where there is no run."""
        return cls(path, read_json(path / "run.json", RunSettings))

    def records(self) -> list[Record]:
        """The records by index, with the stages that are known.

        Raises ValueError where a request stands there twice.
        """
        stages = {one.index: one.stages for one in self._lines("stages.jsonl", Stages)}
        records = sorted(self._lines("records.jsonl", Record), key=lambda record: record.index)
        for before, after in pairwise(records):
            if before.index == after.index:
                raise ValueError(f"{self.path / 'records.jsonl'}: request {after.index} stands there twice")
        for record in records:
            record.stages = stages.get(record.index, [])
        return records

    def schedule(self) -> dict[int, float | None]:
        return {one.index: one.time_s for one in self._lines("schedule.jsonl", _Planned)}

    def samples(self) -> list[Sample]:
        return self._lines("metrics.jsonl", Sample)

    def segments(self) -> list[Segment]:
        """The segments: the last line of each stands."""
        return list({one.segment: one for one in self._lines("segments.jsonl", Segment)}.values())

    def _lines(self, name: str, kind: type[T]) -> list[T]:
        """All whole lines; the last may be half where its writer was killed."""
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return []
        try:
            return msgspec.json.Decoder(kind).decode_lines(data[: data.rfind(b"\n") + 1])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self.path / name}: {error}") from error


class RunWriter:
    """Appends to a run; holds its lock meanwhile, so that no two processes work on one run."""

    def __init__(self, run: RunDirectory) -> None:
        """Raises ValueError where another process works on the run."""
        self.run = run
        self._files: dict[str, int] = {}
        try:
            fcntl.flock(self._file(_FILES[Record]), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(f"{run.path}: another process works on this run") from None
        for path in run.path.glob("*.jsonl"):
            self._mend(path)

    def write(self, line: Record | Stages | Sample | Segment) -> None:
        """Append a line to the file of its kind."""
        data = _encoder.encode(line) + b"\n"
        file = self._file(_FILES[type(line)])
        while data:
            data = data[os.write(file, data) :]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, name: str) -> int:
        file = self._files.get(name)
        if file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = self._files[name] = os.open(self.run.path / name, flags, 0o644)
        return file

    @staticmethod
    def _mend(path: Path) -> None:
        """Cut off the half line of a writer that was killed."""
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(path, whole)


def new_directory(work_dir: Path) -> Path:
    """``<work_dir>/<YYYYmmdd_HHMMSS>``, with a number behind it where that is there already; made."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    number = 1
    while True:
        path = work_dir / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise ValueError(f"{path} is a file; choose another --work-dir") from None
            number += 1
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; choose another --work-dir") from error
        else:
            return path
