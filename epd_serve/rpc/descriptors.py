"""This process's limit of file descriptors, and the error when none is left."""

from __future__ import annotations

import errno
import resource

from epd_serve.errors import Unavailable

#: Below this limit a process logs a warning at its start.
FEW = 1024


def raise_limit() -> int:
    """Raise this process's limit, often 1,024, to its hard limit and return that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def shortage_error(error: OSError) -> Unavailable | None:
    """Return the error for a client if ``error`` means that no descriptor is left, else None."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Unavailable(
        f"too many connections: this process can open {most} files (ulimit -n); try again later",
        code="out_of_descriptors",
    )
