"""The engine benchmark's code: a worker's protocol, and its rooflines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


from benchmarks.engine import Worker  # noqa: E402
from epd_serve.demo import weights_dir  # noqa: E402


@pytest.mark.slow
def test_a_worker_answers_with_times_and_a_missing_engine_with_the_reason() -> None:
    model = str(weights_dir())
    worker = Worker("native", [sys.executable, "-m", "benchmarks.engine_native", model, "--vocabulary", "700"], 1)
    first = worker.ask(stage="generate", batch=2, prompt=8, tokens=3)
    encoded = worker.ask(stage="encode", batch=2, grid=[1, 4, 4], width=1536)
    worker.close()
    assert first is not None and first["steps"] == 3 and 0 < first["model_cpu_s"] <= first["cpu_s"]
    assert encoded is not None and encoded["tokens"] == 8
    absent = Worker("vllm", [sys.executable, "-c", "import there_is_no_such_engine"], 1)
    assert absent.failure is not None and "there_is_no_such_engine" in absent.failure
    assert absent.ask(stage="generate") is None
    absent.close()
