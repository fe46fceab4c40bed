"""Objects that code leaves to the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage() -> Iterator[set[str]]:
    """Give a set that contains, after the block, the types' names of what the block left in reference cycles."""
    names: set[str] = set()
    gc.collect()
    gc.disable()
    try:
        yield names
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names.update(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
