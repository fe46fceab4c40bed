"""A check, its registry, and what it can end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from epd_serve.verify.client import Client

SUITES = ("api", "answers", "media", "faults")
Outcome = Literal["pass", "fail", "unjudged", "skipped"]


class Failed(Exception):
    """The server is wrong; the message says where."""


class Unjudged(Exception):
    """The answer can be called neither right nor wrong."""


class Skipped(Exception):
    """The server, or the command line, lacks what the check needs."""


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """The end of one check.

    Attributes:
        reason: what was wrong, or missing; of a check that passed, what was seen.
        curl: command that repeats the last request of a check that failed.
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

    def counts(self) -> str:
        """Return how many checks had each outcome, in words."""
        counts = Counter(one.outcome for one in self.results)
        return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())

    def write(self, directory: Path) -> None:
        """Write verify.json."""
        (directory / "verify.json").write_bytes(msgspec.json.format(msgspec.json.encode(self)))


#: A check's function; it may return what was seen.
Run = Callable[["Client"], Awaitable[str | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One statement about a server.

    Attributes:
        proves: the statement, in a sentence.
        origin: thread of a peer in which the statement was false, or the specification that makes it.
        limit_s: seconds after which the check counts as failed.
    """

    name: str
    suite: str
    proves: str
    origin: str
    limit_s: float
    run: Run


CHECKS: dict[str, Check] = {}


def check(suite: str, origin: str, *, limit_s: float = 60.0) -> Callable[[Run], Run]:
    """Enter a function under its name; its docstring is the statement that it proves."""

    def enter(run: Run) -> Run:
        name = f"{suite}.{run.__name__}"
        assert name not in CHECKS and suite in SUITES, name
        proves = " ".join((run.__doc__ or "").split())
        CHECKS[name] = Check(name=name, suite=suite, proves=proves, origin=origin, limit_s=limit_s, run=run)
        return run

    return enter


def require(is_right: bool, wrong: str) -> None:
    """Raise Failed with ``wrong`` unless it is right."""
    if not is_right:
        raise Failed(wrong)
