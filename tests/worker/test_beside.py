"""Stages beside each other: real stages of the demo model, in threads and in processes."""

from pathlib import Path

import pytest
import torch

from epd_serve.config.schema import model_path
from epd_serve.worker import beside
from epd_serve.worker.beside import APART, WITHIN, stages_beside
from epd_serve.worker.grid import GridOptions


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> GridOptions:
    monkeypatch.setattr(beside, "SECONDS", 0.01)
    monkeypatch.setattr(beside, "ROUNDS", 1)
    return GridOptions(
        model=Path(model_path("demo")),
        model_name="demo",
        device="cpu",
        dtype=torch.float32,
        threads=1,
        num_tokens=1024,
    )


@pytest.mark.timeout(300)
def test_all_pairs_are_measured(options: GridOptions) -> None:
    told: list[str] = []
    found = stages_beside(options, told.append)
    assert set(found.interference) == {f"{one}/{other}" for one in APART for other in APART}
    assert set(found.interference_within) == set(found.waiting_within) == {f"{a}/{b}" for a, b in WITHIN}
    for pair, waits in found.waiting_within.items():
        assert 0 <= waits <= found.interference_within[pair] < 1000
    assert len(told) == len(APART) ** 2 + len(WITHIN)


def test_a_process_that_does_not_come_up_is_told(options: GridOptions) -> None:
    with pytest.raises(RuntimeError, match="computes X beside others"), beside._process(options, "X"):
        pass
