"""Whom the scheduler is fair to, measured by busy processes."""

import psutil
import pytest

from epd_serve.launch import fairness
from epd_serve.launch.fairness import measure_fairness


def test_it_is_measured_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "SECONDS", 0.2)
    assert measure_fairness(2) in ("threads", "instances")
    assert not [one for one in psutil.Process().children() if "-S" in one.cmdline()]


@pytest.mark.parametrize(("spent", "fair_to"), [((2.0, 4.0), "threads"), ((3.0, 3.0), "instances")])
def test_equal_parts_tell(monkeypatch: pytest.MonkeyPatch, spent: tuple[float, float], fair_to: str) -> None:
    values = iter([0.0, 0.0, *spent])
    monkeypatch.setattr(fairness, "_cpu_s", lambda leader: next(values))
    assert measure_fairness(1) == fair_to
