"""Nothing waits by the time of day, which may be set back or forward by hours."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OF_THE_DAY = re.compile(
    r"\btime\.time(?:_ns)?\b|from time import .*\btime\b|\butcnow\b|datetime\.now|CLOCK_REALTIME"
)
#: Files that tell when something was.
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


def test_all_waiting_is_by_a_clock_that_nobody_sets() -> None:
    paths = [path for package in ("device", "epd_serve", "proxy") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): len(_OF_THE_DAY.findall(path.read_text())) for path in paths}
    used = {path: count for path, count in found.items() if count}
    assert used.keys() == TOLD and max(used.values()) <= 2, used
