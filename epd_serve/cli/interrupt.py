"""Ctrl-C while modules are imported: Python may lose the exception in a callback of its own import system."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a word; only for code that leaves nothing behind."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else has a use for it, or it is ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
