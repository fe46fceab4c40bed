"""Stages beside each other in one process: real stages of the demo model."""

from pathlib import Path

import pytest
import torch

from epd_serve.config.schema import model_path
from epd_serve.profiling import contention
from epd_serve.profiling.contention import PAIRS, stages_beside
from epd_serve.profiling.device_profile import GridOptions

OPTIONS = GridOptions(
    model=Path(model_path("demo")),
    model_name="demo",
    device="cpu",
    dtype=torch.float32,
    threads=1,
    num_tokens=1024,
)


def test_all_pairs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "SECONDS", 0.01)
    monkeypatch.setattr(contention, "ROUNDS", 1)
    told: list[str] = []
    found = stages_beside(OPTIONS, told.append)
    assert set(found) == {f"{one}/{other}" for one, other in PAIRS}
    assert all(0 <= more < 1000 for more in found.values())
    assert len(told) == len(PAIRS)


def test_a_work_that_fails_is_told() -> None:
    def fails() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), contention._repeating(fails, OPTIONS):
        pass
