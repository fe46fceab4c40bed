"""Programs while they run."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable


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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
