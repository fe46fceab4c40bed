"""The ``epd-serve`` command: one file for each of its commands, read when it is asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a word; only for code that leaves nothing behind.

    For imports: Python may lose the exception in a callback of its own import system.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else has a use for it, or it is ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2; EPD_SERVE_TRACEBACK=1 shows where it was found.

    What takes time to import is imported inside, where Ctrl-C ends the program without a word.
    """
    try:
        import io

        with ended_by_ctrl_c():
            from epd_serve.cli.app import app

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        if os.environ.get("EPD_SERVE_TRACEBACK") == "1":
            raise
        print(f"epd-serve: {error}", file=sys.stderr)
        sys.exit(2)
