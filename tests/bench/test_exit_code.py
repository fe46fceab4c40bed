"""The exit code of ``bench``: whether requests failed, whether the SLO was missed."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from epd_serve.bench.outputs import SLO_MISSED, Outputs


def run(num_requests: int, num_failed: int, num_good: int) -> Any:
    share = SimpleNamespace(value=num_good / num_requests, part=num_good, whole=num_requests)
    total = SimpleNamespace(num_requests=num_requests, num_failed=num_failed, attainment=share)
    slo = SimpleNamespace(ttft_ms=1, tpot_ms=1)
    return SimpleNamespace(
        summary=SimpleNamespace(total=total),
        settings=SimpleNamespace(slo=slo),
        label="EPD",
        workload_name="w",
        load_text="1/s",
    )


@pytest.mark.parametrize(
    ("runs", "fail_on_slo", "code"),
    [
        ([run(36, 0, 36)], False, 0),
        ([run(36, 30, 6)], False, 1),
        ([run(36, 0, 36), run(36, 1, 35)], False, 1),
        ([run(36, 36, 0)], False, 1),
        ([run(36, 0, 6)], False, 0),
        ([run(36, 0, 6)], True, SLO_MISSED),
        ([run(36, 30, 6)], True, SLO_MISSED),
        ([run(36, 1, 35)], True, 1),
    ],
)
def test_the_exit_code(runs: list[Any], fail_on_slo: bool, code: int) -> None:
    shown = io.StringIO()
    assert Outputs(fail_on_slo=fail_on_slo).exit_code(Console(file=shown), runs) == code
    num_failed = sum(one.summary.total.num_failed for one in runs)
    assert (f"{num_failed} of {36 * len(runs)} requests failed" in shown.getvalue()) == (num_failed > 0)
