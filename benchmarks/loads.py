"""Loads of ``epd-serve bench`` against a deployment of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import host_busy
from epd_serve.bench.run import new_directory
from epd_serve.bench.session import Session
from epd_serve.bench.types import Record, RunSettings


def run_load(url: str, items: Any, directory: Path, **settings: Any) -> tuple[list[Record], float]:
    """Send requests; return their records, and the part of the host's cores that was busy.

    Exits where the run was interrupted.
    """
    wanted = RunSettings(base_url=url, model="", **settings)
    host_busy()
    run = Session(console=Console(stderr=True)).run(new_directory(directory), wanted, items)
    busy = host_busy()
    if len(run.records) < wanted.num_requests:
        raise SystemExit("interrupted; results so far are kept")
    return list(run.records), busy
