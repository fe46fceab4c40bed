"""What the compiler of the gateway's hot path (setup.py) is told of a class; nothing where nothing is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(*_names, **_settings):
        """``allow_interpreted_subclasses=True``: classes of modules that are not compiled may inherit from it."""
        return lambda cls: cls
