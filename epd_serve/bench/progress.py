"""The live line: rate, POST / RECV / FAIL / FINISH, and TTFT and TPOT of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from epd_serve.bench.runner import Counters
from epd_serve.bench.types import Record

_NUM_RECENT = 64
#: Between two lines where the output is no terminal.
_LOG_INTERVAL_S = 10.0


class Progress:
    """Shows one run. Drawing takes a millisecond or two, so it is done once a second."""

    def __init__(self, console: Console, title: str, num_requests: int, num_done: int = 0) -> None:
        self._console = console
        self._title = title
        self._num_requests = num_requests
        self._num_done = num_done
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._ttft_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._tpot_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._began_s = perf_counter()
        self._logged_s = self._began_s
        self._last = (self._began_s, 0)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def ended(self, record: Record) -> None:
        if record.ttft_s is not None and record.succeeded:
            self._ttft_s.append(record.ttft_s)
            if record.tpot_s is not None:
                self._tpot_s.append(record.tpot_s)

    def show(self, counters: Counters, num_receiving: int) -> None:
        """Draw the live line. ``num_receiving``: requests that have their first token and are not finished."""
        now_s = perf_counter()
        if self._live is None and now_s - self._logged_s < _LOG_INTERVAL_S:
            return
        line = self._line(counters, num_receiving, now_s)
        if self._live is None:
            self._logged_s = now_s
            self._console.print(line, soft_wrap=True, highlight=False)
        else:
            self._live.update(Text(line), refresh=True)

    def note(self, text: str) -> None:
        """Print a line that stays above the live line."""
        self._console.print(text, highlight=False, markup=False)

    def _line(self, counters: Counters, num_receiving: int, now_s: float) -> str:
        since_s, before = self._last
        rate = (counters.sent - before) / max(now_s - since_s, 1e-9)
        self._last = now_s, counters.sent
        finished = self._num_done + counters.finished
        parts = [
            self._title,
            f"{finished}/{self._num_requests}",
            f"{rate:.1f} req/s",
            f"POST={counters.sent} RECV={counters.received + num_receiving} FAIL={counters.failed} "
            f"FINISH={counters.finished}",
            f"TTFT={_ms(self._ttft_s)} TPOT={_ms(self._tpot_s)}",
            f"{now_s - self._began_s:.0f} s",
        ]
        return "  ".join(parts)


def _ms(seconds: deque[float]) -> str:
    return f"{median(seconds) * 1e3:.1f} ms" if seconds else "-"


#: Makes the display of a run: title, requests of it, of which done.
ProgressFactory = Callable[[str, int, int], Progress]
