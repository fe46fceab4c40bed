"""A measured run as the files and plots made of it see it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from epd_serve.bench.arrivals import ClosedLoop, Trace, parse_load
from epd_serve.bench.types import Record, RunSettings, Sample, Summary

MS = 1e3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One workload at one rate against one server.

    Attributes:
        records: by index.
    """

    settings: RunSettings
    summary: Summary
    records: Sequence[Record]
    samples: Sequence[Sample] = ()

    @property
    def label(self) -> str:
        """What the server is called in tables and plots."""
        return self.settings.label or self.settings.topology or self.settings.model

    @property
    def workload_name(self) -> str:
        """Without its settings, as its records have it."""
        return self.records[0].workload if self.records else re.split(r"[,:]", self.settings.workload)[0]

    @property
    def rate(self) -> float | None:
        """Requests a second as planned, of a ramp or a trace on average; None in a closed loop."""
        settings, total = self.settings, self.summary.total
        load = parse_load(settings.arrivals, rate=settings.rate, time_scale=settings.time_scale)
        if isinstance(load, ClosedLoop):
            return None
        if isinstance(load, Trace):
            return total.achieved_rate if total.planned_rate is None else total.planned_rate
        return load.rate

    @property
    def load_text(self) -> str:
        """The load in words: "8 req/s", "16 at once"."""
        if self.rate is not None:
            return f"{self.rate:.4g} req/s"
        return f"{self.settings.arrivals.removeprefix('closed:')} at once"


def file_name(text: str) -> str:
    """The same with nothing in it that a file's name should not have."""
    return re.sub(r"[^A-Za-z0-9._()-]+", "-", text).strip("-.") or "unnamed"
