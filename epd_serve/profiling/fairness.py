"""The kernel's unit of fairness where a CPU's cores are scarce: each thread, or each instance.

An instance has a session of its own (setsid(2)), and where the kernel groups threads by session (sched(7), "The
autogroup feature") every group has an equal part. So an instance of two stages has no more than one of one stage.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from math import sqrt
from typing import Literal

import psutil

#: CPU seconds of each core before the parts are compared: many of the scheduler's slices.
_CPU_S = 2.0
#: Threads of the process that has many, for each core.
_THREADS = 3
#: A thread computes without the interpreter's lock.
_SPIN = """
import hashlib, sys, threading
def spin():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
threads = [threading.Thread(target=spin, daemon=True) for _ in range(int(sys.argv[1]))]
for one in threads:
    one.start()
print(flush=True)
sys.stdin.read()
"""

Sharer = Literal["thread", "instance"]


def cores_go_by() -> Sharer:
    """Measure the unit with a process of many threads and one of a single thread, started as instances are.

    Raises OSError where these cannot run.
    """
    cores = len(os.sched_getaffinity(0))
    many = _THREADS * cores
    started = [_start(count) for count in (many, 1)]
    try:
        for one in started:
            assert one.stdout is not None
            one.stdout.readline()
        before = _cpu_s(started)
        while (
            sum(spent := [now - then for now, then in zip(_cpu_s(started), before, strict=True)]) < _CPU_S * cores
        ):
            if any(one.poll() is not None for one in started):
                raise OSError("a process that was to keep the cores busy has ended")
            time.sleep(0.05)
    finally:
        for one in started:
            one.kill()
            one.communicate()
    return told_by(spent[1] / spent[0], many, cores)


def told_by(ratio: float, many: int, cores: int) -> Sharer:
    """The unit that a ratio of CPU times shows: that of one thread to that of a process of ``many`` threads."""
    by_thread, by_instance = 1 / many, 1 / max(cores - 1, 1)
    return "instance" if ratio > sqrt(by_thread * by_instance) else "thread"


def _start(num_threads: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _SPIN, str(num_threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _cpu_s(processes: Sequence[subprocess.Popen[bytes]]) -> list[float]:
    return [times.user + times.system for times in (psutil.Process(one.pid).cpu_times() for one in processes)]
