"""The watch takes a step for hung by what steps of its kind took, and never one that may compile."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest

from epd_serve.engine.pace import LEAST_S, StepWatch


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.watch = StepWatch(lambda: self.now)

    @contextmanager
    def step(self, kind: Hashable = "prefill") -> Iterator[None]:
        with self.watch.step(kind):
            yield

    def took(self, seconds: float, kind: Hashable = "prefill") -> None:
        with self.step(kind):
            self.now += seconds

    def hangs_after(self, most_s: float) -> float | None:
        """Return the seconds after which the step in progress is taken for hung; None: not within so many."""
        begun = self.now
        self.watch.overdue()
        while self.now < begun + most_s:
            self.now += 0.25
            if self.watch.overdue() is not None:
                return self.now - begun
        return None


@pytest.mark.parametrize(("usual_s", "limit_s"), [(0.05, 60), (2.0, 60), (6.0, 120), (30.0, 600)])
def test_a_step_may_take_many_times_what_is_usual(usual_s: float, limit_s: float) -> None:
    bench = Bench()
    for _ in range(3):
        bench.took(usual_s)
    with bench.step():
        assert bench.hangs_after(2 * limit_s) == pytest.approx(limit_s, abs=1)


def test_the_first_step_of_a_kind_may_compile_for_as_long_as_it_takes() -> None:
    bench = Bench()
    bench.took(0.01, "another kind")
    with bench.step((5, True)):
        assert bench.hangs_after(3600) is None


def test_steps_that_become_slower_are_usual_after_a_while() -> None:
    bench = Bench()
    bench.took(1.0)
    for _ in range(30):
        bench.took(10.0)
    with bench.step():
        assert bench.hangs_after(190) is None


def test_a_stopped_process_an_idle_engine_and_a_step_that_failed_have_not_hung() -> None:
    bench = Bench()
    bench.took(0.1)
    with pytest.raises(RuntimeError), bench.step():
        raise RuntimeError
    assert bench.hangs_after(3 * LEAST_S) is None
    for _ in range(400):  # many steps, none of them long
        with bench.step():
            bench.now += 0.5
            assert bench.watch.overdue() is None
    with bench.step():
        assert bench.hangs_after(30) is None
        bench.now += 86_400
        assert bench.watch.overdue() is None
        assert bench.hangs_after(60) == pytest.approx(60 - 31, abs=1)
