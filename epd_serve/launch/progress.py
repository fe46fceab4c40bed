"""The progress display while a deployment starts: a line for each process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from epd_serve.launch.process import ManagedProcess, ProcessState

_STYLES = {
    ProcessState.STARTING: "yellow",
    ProcessState.LOADING: "yellow",
    ProcessState.READY: "green",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
    ProcessState.DIED: "bold red",
    ProcessState.WAITING: "bold red",
}
_BUSY = (ProcessState.STARTING, ProcessState.LOADING, ProcessState.STOPPING)


class Terminal(Console):
    """The console for a deployment's output; it falls silent when its reader ends (``epd-serve up | head``)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


class Progress:
    """A live table on a terminal; elsewhere one plain line for each change of a process's state.

    Give :meth:`update` to the deployment as its ``on_change``. As a context manager it shows the table until
    :meth:`close` or its end.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._processes: dict[str, ManagedProcess] = {}
        self._closed = False
        self._live = (
            Live(get_renderable=self._table, console=console, refresh_per_second=8)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the table as it stands; what is printed from now on comes below it.

        On a terminal that is, from now on, one line for each process that was started again.
        """
        if self._live:
            self._live.stop()
        self._closed = True

    def update(self, process: ManagedProcess) -> None:
        """Show the state that ``process`` has now."""
        self._processes[process.spec.name] = process
        is_back = self._closed and process.num_restarts > 0 and process.state is ProcessState.READY
        if self._live is None or is_back:
            label = f" ({process.spec.label})" if process.state is ProcessState.STARTING else ""
            line = f"{process.spec.name:<8} {process.state}{label}, {process.elapsed_s:.1f} s"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        return progress_table(list(self._processes.values()))


def progress_table(processes: Sequence[ManagedProcess]) -> Table:
    """Name, purpose, state and seconds of each process."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column()
    table.add_column(justify="right")
    for process in processes:
        style = _STYLES[process.state]
        state = Spinner("dots", Text(process.state, style), style=style) if process.state in _BUSY else None
        table.add_row(
            Text(process.spec.name, "bold"),
            Text(process.spec.label, "dim"),
            state or Text(f"● {process.state}", style),
            f"{process.elapsed_s:.1f} s",
        )
    return table
