"""Programs while they run, and waiting for what they do."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The output of a program, up to the line with ``words``."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    errors = process.stderr.read() if process.stderr is not None else ""
    raise AssertionError(f"it ended without {words!r}: {output}{errors}")


async def until(condition: Callable[[], object], timeout_s: float = 300) -> None:
    """Wait until a function, or a coroutine function, returns something true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with that id, has not ended; a zombie has."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.status() != psutil.STATUS_ZOMBIE)
    return False


def run_cli(*arguments: str) -> int:
    """Run ``epd-serve`` in this process; return its exit code."""
    from epd_serve import cli

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["epd-serve", *arguments])
        cli.main()
    assert ended.value.code is None or isinstance(ended.value.code, int), ended.value.code
    return ended.value.code or 0


def run_file(file: str, *arguments: str, timeout_s: float, **variables: str) -> str:
    """Run a test's file as a program, where Triton compiles kernels; return its output."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests/support")]), **variables}
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
