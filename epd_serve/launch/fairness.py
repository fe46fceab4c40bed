"""Whom a machine's scheduler is fair to where cores are scarce: threads, or sessions with all of their processes.

Instances are sessions of their own. Linux is fair to sessions under ``kernel.sched_autogroup_enabled``, unless a
control group has the CPU's controller, as in some containers; so it is measured and not read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import psutil

#: Of CPU time for each core, and how long to wait for it where others have the machine.
SECONDS, MOST_S = 0.5, 10.0
_SPIN = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if not os.fork():
        break
while True:
    pass
"""
#: An equal part for threads is a third, and one for sessions half.
_BETWEEN = 5 / 12


def measure_fairness(cores: int) -> Literal["threads", "instances"]:
    """A session with a busy process for each core, beside one with twice as many. Takes all cores for itself."""
    with ExitStack() as stack:
        few, many = (stack.enter_context(_session(count)) for count in (cores, 2 * cores))
        before, give_up_s = [_cpu_s(one) for one in (few, many)], time.monotonic() + MOST_S
        spent = [0.0, 0.0]
        while sum(spent) < cores * SECONDS and time.monotonic() < give_up_s:
            time.sleep(0.1)
            spent = [_cpu_s(one) - seconds for one, seconds in zip((few, many), before, strict=True)]
    return "instances" if spent[0] > _BETWEEN * sum(spent) else "threads"


@contextmanager
def _session(count: int) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN, str(count)], start_new_session=True)
    try:
        leader = psutil.Process(process.pid)
        while len(leader.children()) < count - 1:
            time.sleep(0.01)
        yield leader
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cpu_s(leader: psutil.Process) -> float:
    times = [one.cpu_times() for one in (leader, *leader.children())]
    return sum(one.user + one.system for one in times)
