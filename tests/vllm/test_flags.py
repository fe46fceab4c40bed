"""The flags that epd-serve writes are those of the vLLM that is installed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from epd_serve.launch.vllm.probe import CONNECTORS, TESTED, probe_vllm

pytestmark = pytest.mark.vllm
LISTED = Path(__file__).parents[1] / "launch" / "test_vllm_processes.py"


def test_vllm_has_every_flag_that_is_written(python: str) -> None:
    found = probe_vllm(python)
    assert found.vllm.startswith(TESTED)
    assert not any(found.lacks(connector) for connector in CONNECTORS)
    for node in ast.parse(LISTED.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_FLAGS":
            assert set(ast.literal_eval(node.value)) <= set(found.flags)
            return
    raise AssertionError("the list of flags is not there")
