"""Sounds through E-P-D of vLLM instances: the answers of vLLM alone, and each sound encoded once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat import data_url
from sounds import sound
from tiny_families import TINY
from tiny_models import make_tiny_model
from vllm_runs import MODEL, ask_all, check_all, figures, up

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def asked(seed: int, seconds: float) -> dict[str, Any]:
    parts = [
        {"type": "audio_url", "audio_url": {"url": data_url(sound(seed, seconds), "audio/wav")}},
        {"type": "text", "text": "What is heard?"},
    ]
    wish = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True}
    return {"messages": [{"role": "user", "content": parts}], "skip_special_tokens": False, **wish}


def test_answers_are_those_of_vllm_alone(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TINY["qwen2_audio"]  # vLLM takes spectra of 30 seconds alone
    long = replace(tiny, audio={**tiny.audio, "max_source_positions": 1500}, chunk_s=30)
    monkeypatch.setitem(TINY, "qwen2_audio", long)
    model = make_tiny_model("qwen2_audio", tmp_path / "tiny")
    bodies = [asked(seed, 0.5 + 0.4 * seed) for seed in range(4)]
    with up(python, "E-P-D", model, tmp_path) as deployment:
        expected = ask_all(deployment.urls["d0"], bodies)  # by itself it is vLLM alone
        assert len({token for answer in expected for token, _ in answer}) > 4
        for stream in (False, True):
            check_all(deployment.url, bodies, expected, stream=stream)
        assert figures(deployment.urls["e0"])["epd_serve_features_total encoded"] == len(bodies) + 1
        assert figures(deployment.urls["p0"])["epd_serve_features_total fetched"] == len(bodies)
        for name in deployment.urls:
            deployment.check_idle(name)
