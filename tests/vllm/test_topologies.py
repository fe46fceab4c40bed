"""Each topology of vLLM instances behind the gateway answers as vLLM alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_runs import Tokens, check_all, figures, up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("topology", ["E-PD", "EP-D"])
def test_answers_are_those_of_vllm_alone(
    topology: str, python: str, model: Path, asked: list[dict[str, Any]], expected: list[Tokens], tmp_path: Path
) -> None:
    with up(python, topology, model, tmp_path) as deployment:
        for stream in (False, True):
            check_all(deployment.url, asked, expected, stream=stream)
        if topology == "EP-D":
            moved = figures(deployment.urls["d0"])["prompt_tokens_by_source_total external_kv_transfer"]
            assert moved > 0, "D has computed the prompts itself"
        for name in deployment.urls:
            deployment.check_idle(name)
