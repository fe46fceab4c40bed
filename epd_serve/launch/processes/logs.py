"""Pieces of the logs that a deployment's processes write, one file for each."""

from __future__ import annotations

from pathlib import Path

import msgspec

TAIL_LINES = 20
#: Of one piece.
_MOST_BYTES = 1 << 20


class LogPiece(msgspec.Struct):
    """A piece of a log.

    Attributes:
        text: whole lines.
        end: the place in bytes behind them, where the next piece begins.
    """

    text: str
    end: int


def log_piece(file: Path, after: int | None) -> LogPiece:
    """The lines from the byte ``after`` on, at most 1 MiB of them; None: the last lines. Raises OSError."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        begin = max(0, size - _MOST_BYTES) if after is None else after
        stream.seek(begin)
        data = stream.read(_MOST_BYTES)
    # A line that is being written comes with the next piece, unless it is longer than any.
    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _MOST_BYTES else b"")
    lines = whole.decode("utf-8", "replace")
    if after is None:
        lines = "".join(lines.splitlines(keepends=True)[-TAIL_LINES:])
    return LogPiece(text=lines, end=begin + len(whole))


def log_files(directory: Path) -> dict[str, Path]:
    """The logs of a run by the names of their processes."""
    return {file.stem: file for file in sorted(directory.glob("*.log"))}
