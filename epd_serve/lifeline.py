"""Run a command that cannot outlive its supervisor, however the supervisor ends.

``python -m epd_serve.lifeline [--group] PARENT_PID COMMAND...`` ties itself to the parent and runs the command.
With ``--group`` it leads a process group, which ends with it: for programs that may leave children behind.
Python's resource trackers in the group may first remove leaked shared memory and semaphores. The file also runs as
a script.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
#: Time for resource trackers to clean up after the processes that they serve have ended.
CLEAN_UP_S = 2.0
_LOOK_S = 0.02
_TRACKER = b"multiprocessing.resource_tracker"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    The child calls it early, since code between fork and exec may deadlock in a threaded parent. If the parent
    ended before the call, the process ends here. Linux ties the signal to the parent's *thread*: a parent must
    start children from a thread that outlives them.

    Args:
        parent_pid: the process that started this one.
    """
    _tell_of_parents_end(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_group_together() -> None:
    """Kill the rest of this process's group when this process ends, even if it is killed.

    Make this process the leader of its group. Call it while the process has one thread: it forks a process that
    waits in the group. Descendants in other groups survive.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    leader = os.getpid()
    if os.fork() == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            _tell_of_parents_end(signal.SIGUSR1)
            for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - let readers of its pipes see their end
                os.closerange(int(descriptor), int(descriptor) + 1)
            while os.getppid() == leader:
                signal.sigwait({signal.SIGUSR1})
            _end_group(leader)
        finally:
            os.killpg(leader, signal.SIGKILL)


def _end_group(group: int) -> None:
    """Kill all other processes of the group except resource trackers, and wait until these have cleaned up.

    A tracker ends by itself once no process holds its pipe open.
    """
    deadline = time.monotonic() + CLEAN_UP_S
    while (others := _members(group)) and time.monotonic() < deadline:
        for pid, command in others.items():
            if _TRACKER not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _members(group: int) -> dict[int, bytes]:
    """Return the command lines of the other running processes of a group."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - the process stays in memory: few imports
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
            state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state != b"Z":
                with open(f"/proc/{name}/cmdline", "rb") as command:  # noqa: PTH123
                    found[int(name)] = command.read()
    return found


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
    os.execv(command[0], command)  # exec keeps the parent-death signal
