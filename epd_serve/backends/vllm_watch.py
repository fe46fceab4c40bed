"""Whether a vLLM engine works, judged by minutes."""

from __future__ import annotations

from collections.abc import Callable

from epd_serve.backends.vllm_answer import VllmCall
from epd_serve.backends.vllm_load import VllmFigures
from epd_serve.errors import InvalidRequest, StageTimeout

#: An engine that has requests and moves none of its counters for so long is stuck. The first step of its kind
#: compiles, and the counters move when a step ends.
STUCK_S = 300.0
#: How long an engine may be idle until it is given something to compute.
IDLE_S = 60.0


class EngineWatch:
    """The watch of one instance. After :data:`IDLE_S` without work, an engine is given a trial to compute."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._progress: tuple[float, int] | None = None
        self._moved_at = 0.0
        self._trial: VllmCall | None = None

    def look(self, figures: VllmFigures, now: float, make_trial: Callable[[], VllmCall]) -> None:
        """Judge the engine by its figures. Raises ServeError where it is stuck, or has failed its trial.

        A trial, as any work, may take :data:`STUCK_S`. ``make_trial`` makes a call that has the engine compute
        something.
        """
        progress = (figures.started_at, figures.progress)
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        if self._trial is not None and self._trial.opened.done():
            self._end_trial(now)
        is_busy = figures.num_running > 0 or self._trial is not None
        if is_busy and now - self._moved_at > STUCK_S:
            raise StageTimeout(f"instance {self._name} has work and has computed nothing for {STUCK_S:g} s")
        if not is_busy and now - self._moved_at > IDLE_S:
            self._moved_at = now  # its patience begins anew
            self._trial = make_trial()
            self._trial.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
            self._trial.send()

    def _end_trial(self, now: float) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        self._moved_at = now
        try:
            trial.opened.result()
        except InvalidRequest:
            pass  # it is a model without pictures that says so
        finally:
            trial.close()
