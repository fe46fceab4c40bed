"""epd-serve: multimodal LLM serving with separate Encode, Prefill and Decode instances."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """``__version__``, looked up when it is asked for: that takes longer than all else a command begins with."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("epd-serve")
    except PackageNotFoundError:  # in the Python of another environment, which has found the package by its path
        return "0"
