"""The output of a program while it runs."""

from __future__ import annotations

import subprocess


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What a program prints, up to the line with ``words``."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"it ended without {words!r}: {output}")
