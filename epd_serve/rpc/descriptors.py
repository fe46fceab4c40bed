"""File descriptors: the limit of this process, and the error for a client where none is left."""

from __future__ import annotations

import errno
import resource

from epd_serve.errors import Unavailable

#: A process that may have fewer says so when it starts.
FEW = 1024


def raise_limit() -> int:
    """Raise this process's limit to the most that it may have; return that.

    The limit at its start is often 1,024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def shortage(error: OSError) -> Unavailable | None:
    """The error to answer with where ``error`` reports that no descriptor is left; None for any other error."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Unavailable(
        f"too many connections at once: this process may have {most} files open (ulimit -n); try again later",
        code="out_of_descriptors",
    )
