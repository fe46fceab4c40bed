"""Memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
