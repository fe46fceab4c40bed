"""A part of a core for each process: the kernel's CPU bandwidth control, by control groups of version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
#: Short beside a step of a model: a process runs for a part of each period, and stands still for the rest.
PERIOD_US = 10_000


@contextmanager
def limited(pids: Mapping[str, int], cores: float) -> Iterator[None]:
    """Each of these processes, with all of its threads, gets so much of the machine's time at most.

    Each keeps to one core, in turn: on several, one thread's part of a period could leave nothing to the others.
    Raises ValueError where the machine has no such control, PermissionError where the user may not have it (root
    may).
    """
    tree, home = _tree(), _home()
    quota_us = round(cores * PERIOD_US)
    usable = cycle(sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        for name, pid in pids.items():
            _pin(pid, next(usable))
            group = tree / f"epd-serve-{os.getpid()}-{name}"
            group.mkdir()
            stack.callback(_remove, group, home)
            if tree == ROOT:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cgroup.procs").write_text(str(pid))
        yield


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended since the listing
            os.sched_setaffinity(int(task.name), [core])


def _tree() -> Path:
    """Where groups are made that have a quota."""
    if (ROOT / "cpu" / "cpu.cfs_quota_us").exists():
        return ROOT / "cpu"
    controllers = ROOT / "cgroup.controllers"
    if not controllers.exists() or "cpu" not in controllers.read_text().split():
        raise ValueError(f"{ROOT} has no control of CPU time; the kernel needs CONFIG_CFS_BANDWIDTH")
    (ROOT / "cgroup.subtree_control").write_text("+cpu")
    return ROOT


def _home() -> Path:
    """The group of this process, to which others go back."""
    tree = _tree()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if tree == ROOT else "cpu" in controllers.split(","):
            return tree / path.lstrip("/")
    return tree


def _remove(group: Path, home: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            (home / "cgroup.procs").write_text(pid)
    group.rmdir()
