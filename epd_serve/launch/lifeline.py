"""A child process that cannot outlive its supervisor, however the supervisor ends.

``python -m epd_serve.launch.lifeline PARENT_PID COMMAND...`` becomes a command that is tied in this way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    Called by the child itself, early, since code between fork and exec may deadlock in a threaded parent. If
    the parent ended before the call, the process ends here. Linux ties the signal to the parent's *thread*:
    whoever starts children must do it from a thread that lives as long as they shall.

    Args:
        parent_pid: the process that started this one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # the kernel keeps the tie
