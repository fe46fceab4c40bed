"""Instances over several devices: the same tokens as over one, also where KV goes between widths.

A family for each way in which the KV of one width becomes that of another: wider, whole to split, split to whole.
What each family does in each width and between any two: ``tests/models/test_tensor_parallel.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from identity import start_fleet


@pytest.mark.parametrize(
    ("kind", "topology", "ahead"),
    [
        pytest.param("qwen3_vl", "EP@tp2-D@tp4", "off", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "EP-D@tp4", "on", marks=pytest.mark.slow),
        ("llava", "EP@tp2-D@tp2", "on"),
    ],
)
async def test_tokens_equal_generate(tmp_path: Path, kind: str, topology: str, ahead: str) -> None:
    """Also where the tokens of a step are sent from rank to rank before the host knows them."""
    instances = {"async_scheduling": ahead}
    model = tiny_models.make_tiny_model(kind, tmp_path / kind)
    async with start_fleet(model, topology, instances=instances) as fleet:
        await fleet.check_tokens(("ep0", "d0"))
