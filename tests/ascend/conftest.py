"""Reports the ladder: operators and cases of each level. See ladder.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ascend_ladder import LEVELS, OPERATORS


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ascend_hw: needs an NPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes = {
        outcome: Counter(_level(report) for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    terminalreporter.section("Ascend ladder")
    for level in LEVELS:
        cases = [f"{counts[level]} {outcome}" for outcome, counts in outcomes.items() if counts[level]]
        if not outcomes["passed"][level] + outcomes["failed"][level] + outcomes["error"][level]:
            what = f"not run{': no NPU' if level == 'hw' else ''} ({', '.join(cases) or 'no cases'})"
        else:
            what = (
                f"{len(OPERATORS[level])} operators, {', '.join(cases)}" if OPERATORS[level] else ", ".join(cases)
            )
        terminalreporter.line(f"{level:9} {what}")


def _level(report: pytest.TestReport | pytest.CollectReport) -> str:
    """``tests/ascend/test_semantics_graph.py`` belongs to the level semantics."""
    path = Path(report.nodeid.partition("::")[0])
    return path.stem.removeprefix("test_").partition("_")[0] if path.parent.name == "ascend" else ""
