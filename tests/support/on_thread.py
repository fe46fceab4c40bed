"""Calls on a thread of their own, where a device's context is none yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a call on a new thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    assert results, "the call failed"
    return results[0]
