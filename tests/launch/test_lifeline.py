"""Everything that a supervisor started ends with it, children that know nothing of it included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from program import is_alive, wait_until

from epd_serve import lifeline

#: A program whose child heeds no signal that it may ignore, and does not look at its parent; it may end early.
TREE = """
import signal, subprocess, sys
child = "import signal, time\\n" + "".join(f"signal.signal({n}, signal.SIG_IGN)\\n" for n in (1, 2, 10, 15))
child += "print('there', flush=True); time.sleep(1000)"
started = subprocess.Popen([sys.executable, "-S", "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
print('child', started.pid, flush=True)
sys.stdin.readline()
"""
#: A program with shared memory and semaphores that it and its child use, and that it removes at no end of its own.
SHARING = """
import multiprocessing as mp, sys, time
from multiprocessing.shared_memory import SharedMemory
context = mp.get_context("spawn")
memory, lock = SharedMemory(create=True, size=4096), context.Lock()
started = context.Process(target=time.sleep, args=(1000,), daemon=True)
started.start()
names = memory.name, lock._semlock.name.strip("/")
print("child", started.pid, flush=True)
print(*names, flush=True)
sys.stdin.readline()
"""
SUPERVISOR = """
import os, subprocess, sys
command = [sys.executable, "-IS", sys.argv[3], "--group", str(os.getpid())]
command += [sys.executable, "-S", "-c", sys.argv[1]]
started = subprocess.Popen(command, start_new_session=sys.argv[2] == "yes")
print('program', started.pid, flush=True)
started.wait()
sys.stdin.readline()
"""


@contextmanager
def supervised(
    *, session: bool = True, program: str = TREE
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A supervisor, the program that it started, and that program's child."""
    command = [sys.executable, "-c", SUPERVISOR, program, "yes" if session else "no", lifeline.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        found: dict[str, psutil.Process] = {}
        try:
            for name, pid in (supervisor.stdout.readline().split() for _ in range(2)):  # in no order
                found[name] = psutil.Process(int(pid))
            yield supervisor, found["program"], found["child"]
        finally:
            supervisor.kill()
            for one in found.values():
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def members(group: int) -> list[psutil.Process]:
    """Processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and is_alive(process):
                found.append(process)
    return found


@pytest.mark.parametrize("session", [True, False])
def test_a_killed_supervisor_takes_the_tree_along(session: bool) -> None:
    with supervised(session=session) as (supervisor, program, child):
        assert os.getpgid(child.pid) == program.pid, "the group is the program's"
        supervisor.kill()
        wait_until(lambda: not is_alive(program) and not is_alive(child), "the tree has ended")
        wait_until(lambda: not members(program.pid), "nothing is left of the group")


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_program_that_ends_takes_its_children_along(number: signal.Signals | None) -> None:
    with supervised() as (supervisor, program, child):
        if number is None:
            assert supervisor.stdin is not None
            supervisor.stdin.write("\n")  # it ends by itself, and well
            supervisor.stdin.flush()
        else:
            program.send_signal(number)
        wait_until(lambda: not is_alive(child), "the child has ended")
        assert supervisor.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_in_shared_memory(number: signal.Signals) -> None:
    """The resource tracker cleans up after a program that is killed, too."""
    with supervised(program=SHARING) as (supervisor, program, child):
        assert supervisor.stdout is not None
        memory, semaphore = supervisor.stdout.readline().split()
        files = [Path("/dev/shm", memory), Path("/dev/shm", f"sem.{semaphore}")]
        assert all(file.exists() for file in files)
        program.send_signal(number)
        wait_until(lambda: not is_alive(child) and not members(program.pid), "the group has ended")
        assert not any(file.exists() for file in files)
