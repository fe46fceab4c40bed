"""The tables of docs/reports/verify.md, from the results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.common import RESULTS

_MARKS = {"pass": "✓", "fail": "**✗**", "unjudged": "?", "skipped": "–"}


def planted_table() -> Iterator[str]:
    """Each planted fault, the check that it is planted for, and the others that find it."""
    found = json.loads((RESULTS / "verify-planted.json").read_text())["faults"]
    yield "| planted fault | its check | found by | others that find it |"
    yield "|---|---|---|---|"
    for fault, one in found.items():
        own, others = one["planted_for"], [name for name in one["found_by"] if name != one["planted_for"]]
        shown = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
        mark = _MARKS["pass" if own in one["found_by"] else "fail"] if fault else ""
        yield f"| {fault or 'none'} | {own} | {mark} | {shown} |"


def field_table() -> Iterator[str]:
    """Check × server; then what failed, and in which words."""
    servers: dict[str, Any] = json.loads((RESULTS / "verify-field.json").read_text())["servers"]
    names = {name: f"{number}" for number, name in enumerate(servers, start=1)}
    for name, number in names.items():
        counts = Counter(one["outcome"] for one in servers[name].values())
        yield f"{number}. {name}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in _MARKS)}"
    yield ""
    yield f"| check | {' | '.join(names.values())} |"
    yield f"|---|{'---|' * len(names)}"
    for check in dict.fromkeys(check for one in servers.values() for check in one):
        results = [one.get(check) for one in servers.values()]
        yield f"| {check} | {' | '.join(_MARKS[one['outcome']] if one else '' for one in results)} |"
    yield ""
    yield "| server | check | what was wrong |"
    yield "|---|---|---|"
    for name, one in servers.items():
        for check, result in one.items():
            if result["outcome"] == "fail":
                yield f"| {names[name]} | {check} | {' '.join(result['reason'].replace('|', '/')[:160].split())} |"
