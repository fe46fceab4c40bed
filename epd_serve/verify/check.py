"""Checks, their registry and their outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

SUITES = ("api", "answers", "media", "faults")
Outcome = Literal["pass", "fail", "unjudged", "skipped"]


class Verdict(Exception):
    """Ends a check with an outcome other than a pass; the message is the reason."""

    outcome: ClassVar[Outcome]


class Failed(Verdict):
    """The server is wrong; the message says how."""

    outcome = "fail"


class Unjudged(Verdict):
    """The answer is neither clearly right nor clearly wrong."""

    outcome = "unjudged"


class Skipped(Verdict):
    """The server or the command line lacks a precondition of the check."""

    outcome = "skipped"


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """The result of one check.

    Attributes:
        reason: the fault, the missing precondition, or the observations of a passed check.
        curl: command that repeats the last request of a failed check.
    """

    check: str
    suite: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    curl: str = ""


class Report(msgspec.Struct):
    """The results of one server."""

    url: str
    model: str
    results: list[Result]


#: A check's function of the :class:`~epd_serve.verify.client.Client`; it may return its observations.
Run = Callable[[Any], Awaitable[str | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One statement about a server.

    Attributes:
        proves: the statement as a sentence.
        origin: issue of another project where the statement was false, or the specification behind it.
        limit_s: seconds after which the check fails.
    """

    name: str
    suite: str
    proves: str
    origin: str
    limit_s: float
    run: Run


CHECKS: dict[str, Check] = {}


def check(suite: str, origin: str, *, limit_s: float = 60.0) -> Callable[[Run], Run]:
    """Register a function under its name; its docstring is the statement."""

    def register(run: Run) -> Run:
        name = f"{suite}.{run.__name__}"
        assert name not in CHECKS and suite in SUITES, name
        proves = " ".join((run.__doc__ or "").split())
        CHECKS[name] = Check(name=name, suite=suite, proves=proves, origin=origin, limit_s=limit_s, run=run)
        return run

    return register


def require(is_right: bool, fault: str) -> None:
    """Raise Failed with ``fault`` unless ``is_right``."""
    if not is_right:
        raise Failed(fault)
