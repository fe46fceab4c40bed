"""Slowdown of operators and stages beside each other on one device (EPD-Serve, section 3.5, figure 6)."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Self

import msgspec

from epd_serve.cost.profile import read_measured

Demand = Literal["compute", "bandwidth", "communication"]
Kind = Literal["operator", "stage"]
Isolation = Literal["process", "stream"]

#: Fields of files that earlier releases wrote.
_RETIRED = ("clock", "skipped")
#: Means that lie closer together than this are called equal: about what a repetition changes.
_MARGIN = 0.05


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator or a stage, and its time where nothing else runs.

    ``alone_spread`` is how much longer the longest of several measurements was than the shortest: increases of
    that size may be noise.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    kind: Kind
    demand: Demand
    alone_s: Annotated[float, msgspec.Meta(gt=0)]
    alone_spread: Annotated[float, msgspec.Meta(ge=0)]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Mean increases of pairs that want the same resource of the device, and of pairs that want different ones."""

    like: float
    unlike: float

    def __str__(self) -> str:
        means = f"pairs of like demand take {self.like:+.0%}, pairs of unlike demand {self.unlike:+.0%}"
        if self.like - self.unlike > _MARGIN:
            return f"{means}: unlike pairs interfere less, as EPD-Serve says"
        if self.unlike - self.like > _MARGIN:
            return f"{means}: unlike pairs interfere more here, against what EPD-Serve found on its NPU"
        return f"{means}: there is no difference here"


class InterferenceMatrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency increases of pairs on one device.

    ``increase[i][j]`` is how much longer workload ``i`` takes while workload ``j`` runs beside it, as a share of
    its time alone: 0.25 is a quarter longer, a small negative number is noise. None was not measured: operators
    are paired with operators, stages with stages. ``findings``: the comparisons of like and unlike pairs in words,
    for readers of the file.
    """

    device: str
    description: str
    isolation: Isolation
    dtype: str
    threads: int | None
    seconds: float
    workloads: list[Workload]
    increase: list[list[float | None]]
    findings: list[str] = []

    def __post_init__(self) -> None:
        names = [workload.name for workload in self.workloads]
        if len(set(names)) < len(names):
            raise ValueError(f"workloads {', '.join(names)}: each is listed once")
        if [len(row) for row in self.increase] != [len(names)] * len(names):
            raise ValueError(f"increase has a row and a column for each of the {len(names)} workloads")
        if any(value is not None and not -1 < value < float("inf") for row in self.increase for value in row):
            raise ValueError("an increase is a number above -1: nothing takes less than no time")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError that names the file and what is wrong with it."""
        return read_measured(path, cls, f"interference file {path}", "epd-serve interference", retired=_RETIRED)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def with_findings(self) -> Self:
        """Return the matrix with the results of :meth:`compare` in words."""
        kinds: tuple[Kind, ...] = ("operator", "stage")
        said = [f"{kind}s: {comparison}" for kind in kinds if (comparison := self.compare(kind)) is not None]
        return msgspec.structs.replace(self, findings=said)

    def increase_of(self, name: str, beside: str) -> float:
        """The share by which ``beside`` lengthens ``name``, at least 0.

        Raises KeyError for a pair that was not measured.
        """
        index = {workload.name: i for i, workload in enumerate(self.workloads)}
        value = self.increase[index[name]][index[beside]]
        if value is None:
            raise KeyError(f"{name} beside {beside}")
        return max(value, 0.0)

    def compare(self, kind: Kind = "operator") -> Comparison | None:
        """Like against unlike pairs, each by the mean of its two increases; None where one sort is missing."""
        like: list[float] = []
        unlike: list[float] = []
        chosen = [(i, w) for i, w in enumerate(self.workloads) if w.kind == kind]
        for (i, first), (j, second) in combinations_with_replacement(chosen, 2):
            values = [value for value in (self.increase[i][j], self.increase[j][i]) if value is not None]
            if values:
                (like if first.demand == second.demand else unlike).append(fmean(values))
        return Comparison(like=fmean(like), unlike=fmean(unlike)) if like and unlike else None
