"""A child process that cannot outlive its supervisor, however the supervisor ends.

``python -m epd_serve.lifeline [--group] PARENT_PID COMMAND...`` becomes a command that is tied in this way.
With ``--group`` it leads a process group, which ends with it: for programs whose children are not tied to them.
It may be run as a script.
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
    a parent must start children from a thread that lives as long as they shall.

    Args:
        parent_pid: the process that started this one.
    """
    _tell_of_parents_end(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_group_together() -> None:
    """Have all that is left of this process's group killed when it ends, also where it is killed itself.

    It leads the group from here on, if it did not before. Must be called while it has one thread: it forks a
    process that does nothing but wait, and stays in the group. A descendant with a group of its own is not found.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    leader = os.getpid()
    if os.fork() == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            _tell_of_parents_end(signal.SIGUSR1)
            for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - its readers wait for no end of this process
                os.closerange(int(descriptor), int(descriptor) + 1)
            while os.getppid() == leader:
                signal.sigwait({signal.SIGUSR1})
        finally:
            os.killpg(leader, signal.SIGKILL)


def _tell_of_parents_end(signal_number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with_group = arguments[0] == "--group"
    parent_pid, *command = arguments[with_group:]
    die_with_parent(int(parent_pid))
    if with_group:
        keep_group_together()
    os.execv(command[0], command)  # the kernel keeps the tie
