"""Nothing waits by the time of day, which may be set back or forward by hours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OF_THE_DAY = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
#: Files that tell when something was, by its functions.
TOLD = {
    "epd_serve/autoscale/role_loop.py",
    "epd_serve/bench/session.py",
    "epd_serve/rpc/joining.py",  # which of two processes of one name began later
    "epd_serve/telemetry/otel.py",
    "epd_serve/telemetry/trace_file.py",
    "proxy/observe/access_log.py",
    "proxy/api/endpoint.py",
    "proxy/api/views.py",
}


def uses(source: str) -> Iterator[int]:
    """Lines that ask for the time of day."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in _OF_THE_DAY or node.attr == "CLOCK_REALTIME":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and any(
            (node.module, name.name) in _OF_THE_DAY for name in node.names
        ):
            yield node.lineno


def test_all_waiting_is_by_a_clock_that_nobody_sets() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for package in ("device", "epd_serve", "proxy")
        for path in (ROOT / package).rglob("*.py")
        if (lines := list(uses(path.read_text())))
    }
    assert found.keys() == TOLD, found
    assert all(len(lines) <= 2 for lines in found.values()), found
