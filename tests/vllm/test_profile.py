"""A profile of a real vLLM server, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_runs import monolith

from epd_serve.profiling.endpoint import profile_endpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_steps_and_encodes_are_told_apart(python: str, model: Path, tmp_path: Path) -> None:
    with monolith(python, model, tmp_path / "log") as url:
        profile = profile_endpoint(url, str(model), "cpu")
    assert profile.residuals["decode"].worst < 0.5
    assert profile.encode_s([896**2]) > profile.encode_s([224**2]) > 0
    assert profile.step_s(512, 1, 0, 512**2) > profile.step_s(1, 1, 64) > 0
    assert profile.request_s > 0
