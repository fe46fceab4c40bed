"""Parts of an instance that experiments make otherwise: a baseline of a paper registers in place of the product's.

``EPD_SERVE_PLUGINS`` names the modules to import, with commas between them; each calls :func:`register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Part = Literal["transport", "mooncake engine", "features", "layer groups", "engine", "encoder"]

PLUGINS = "EPD_SERVE_PLUGINS"
_REGISTERED: dict[Part, Any] = {}


def register(part: Part, make: Callable[..., Any]) -> None:
    """Have ``make`` called wherever the product would make this part from now on."""
    _REGISTERED[part] = make


def factory(part: Part, default: T) -> T:
    """The maker of a part: the one that is registered, or the product's."""
    _import_plugins()
    found: T = _REGISTERED.get(part, default)
    return found


def as_it_is(part: T) -> T:
    """Change nothing: the maker of parts that only an experiment wraps."""
    return part


@cache
def _import_plugins() -> None:
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        import_module(name)
