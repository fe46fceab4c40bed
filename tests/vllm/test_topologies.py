"""Each topology of vLLM instances behind the gateway answers as vLLM alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_runs import Tokens, ask_all, figures, same, up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def check(url: str, asked: list[dict[str, Any]], expected: list[Tokens]) -> None:
    for stream in (False, True):
        answers = ask_all(url, asked, stream=stream)
        wrong = [index for index, (a, b) in enumerate(zip(answers, expected, strict=True)) if not same(a, b)]
        assert not wrong, [(index, answers[index], expected[index]) for index in wrong]


@pytest.mark.parametrize("topology", ["E-PD", "EP-D", "PD"])
def test_answers_are_those_of_vllm_alone(
    topology: str, python: str, model: Path, asked: list[dict[str, Any]], expected: list[Tokens], tmp_path: Path
) -> None:
    with up(python, topology, model, tmp_path) as deployment:
        check(deployment.url, asked, expected)
        if topology == "EP-D":
            moved = figures(deployment.urls["d0"])["prompt_tokens_by_source_total external_kv_transfer"]
            assert moved > 0, "D has computed the prompts itself"
        for name in deployment.urls:
            deployment.check_idle(name)
