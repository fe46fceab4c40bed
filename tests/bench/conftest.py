"""One scripted server for all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted_server
from load_tester import Scripted


@pytest.fixture(scope="session")
def scripted() -> Iterator[Scripted]:
    command = [sys.executable, str(Path(scripted_server.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Scripted(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.stdin.close()
