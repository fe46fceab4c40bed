"""The flags that epd-serve writes are those of the vLLM that is installed."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from epd_serve.launch.vllm.installed import find_vllm, lacks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LISTED = Path(__file__).parents[1] / "launch" / "test_vllm_processes.py"


def test_vllm_has_every_flag_that_is_written(python: str) -> None:
    assert not lacks(find_vllm(python))["E by itself"]
    command = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for node in ast.parse(LISTED.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_FLAGS":
            flags = {f"--{flag.replace('_', '-')}" for flag in ast.literal_eval(node.value)}
            assert not {flag for flag in flags if flag not in told}
            return
    raise AssertionError("the list of flags is not there")
