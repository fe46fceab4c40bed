"""The workers of the benchmark with real weights: their protocol, and an engine that is missing."""

from __future__ import annotations

import sys

import pytest

from benchmarks.common import Worker
from epd_serve.demo import weights_dir


@pytest.mark.slow
@pytest.mark.parametrize("engine", [[], ["--transformers"]], ids=["native", "transformers"])
def test_a_worker_answers_with_times(engine: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine_native",
        str(weights_dir()),
        "--vocabulary",
        "700",
        *engine,
    ]
    worker = Worker("engine", command, 1)
    answer = worker.ask(batch=2, prompt=8, tokens=3)
    worker.close()
    assert answer is not None and answer["cpu_s"] > 0


def test_a_missing_engine_gives_the_reason() -> None:
    absent = Worker("vllm", [sys.executable, "-c", "import there_is_no_such_engine"], 1)
    assert absent.failure is not None and "there_is_no_such_engine" in absent.failure
    assert absent.ask(batch=1) is None
    absent.close()
