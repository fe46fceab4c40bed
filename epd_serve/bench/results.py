"""A measured run as the files and plots made of it see it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_serve.bench.arrivals import ClosedLoop, Trace, parse_load
from epd_serve.bench.types import Record, RunSettings, Sample, Summary

MS = 1e3
_SECRET = re.compile(r"key|secret|password|credential|authorization|(access|auth|bearer)_?token", re.IGNORECASE)
_HIDDEN = "(hidden)"


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
        """The name of the run's server in tables and plots: its label, else its topology, else its model."""
        return self.settings.label or self.settings.topology or self.settings.model

    @property
    def workload_name(self) -> str:
        """The workload's name without its settings, as in the records."""
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


def public_settings(settings: RunSettings) -> dict[str, Any]:
    """The settings for results that are passed on: without the values of secrets in the request's fields."""
    public: dict[str, Any] = msgspec.to_builtins(settings)
    public["fields"] = _without_secrets(public["fields"])
    if public["fields"] != settings.fields:  # where they are typed as well
        public["argv"] = [
            _HIDDEN if before == "--extra-body" or one.startswith("--extra-body=") else one
            for before, one in zip(["", *settings.argv], settings.argv, strict=False)
        ]
    return public


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _HIDDEN if _SECRET.search(key) else _without_secrets(one) for key, one in value.items()}
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value


def file_name(text: str) -> str:
    """Return ``text`` with hyphens for all characters that do not belong into a file's name."""
    return re.sub(r"[^A-Za-z0-9._()-]+", "-", text).strip("-.") or "unnamed"
