"""Parts of an instance that experiments replace, for example with a paper's baseline.

``EPD_SERVE_PLUGINS`` lists the modules to import, separated by commas; each calls :func:`register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Part = Literal["transport", "features", "layer groups"]

PLUGINS = "EPD_SERVE_PLUGINS"
_REGISTERED: dict[Part, Any] = {}


def register(part: Part, make: Callable[..., Any]) -> None:
    """Create this part with ``make`` from now on, instead of the default."""
    _REGISTERED[part] = make


def factory(part: Part, default: T) -> T:
    """Return the registered factory of a part, or ``default``."""
    _import_plugins()
    found: T = _REGISTERED.get(part, default)
    return found


def as_it_is(part: T) -> T:
    """Return the part unchanged: the default factory of parts that only experiments wrap."""
    return part


@cache
def _import_plugins() -> None:
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        import_module(name)
