"""The ``epd-serve`` command: one file per subcommand, imported on demand."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process silently; only for code without side effects.

    Needed for imports, because Python may lose the exception in a callback of its import system.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # handled elsewhere, or ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Run the command. A user's mistake prints one line to stderr, with exit code 2.

    EPD_SERVE_TRACEBACK=1 adds the traceback.

    Slow imports are inside, where Ctrl-C ends the program silently.
    """
    try:
        import io

        with ended_by_ctrl_c():
            from epd_serve.cli.app import app

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # "?" for characters that a terminal without UTF-8 lacks
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        if os.environ.get("EPD_SERVE_TRACEBACK") == "1":
            raise
        print(f"epd-serve: {error}", file=sys.stderr)
        sys.exit(2)
