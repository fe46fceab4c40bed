"""The results of one server, as JSON."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from epd_serve.verify.check import Result


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
