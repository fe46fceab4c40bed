"""Tools that reports need and the extra ``bench`` installs or expects: plotly's script and a browser."""

from __future__ import annotations

import shutil

_INSTALL = "pip install '.[bench]' in epd-serve's clone"
_BROWSERS = (
    "google-chrome",
    "chromium",
    "chromium-browser",
    "chrome",
    "chromium-headless-shell",
    "chrome-headless-shell",
)


def plotly_script() -> str:
    """plotly.js. Raises ValueError that says what to install where it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(f"the report's plots need plotly: {_INSTALL}") from None
    return str(get_plotlyjs())


def browser() -> str:
    """The browser that draws pictures. Raises ValueError where there is none."""
    for name in _BROWSERS:
        if path := shutil.which(name):
            return path
    raise ValueError("pictures are drawn by a browser; install chromium or google-chrome, or leave --png out")
