"""A small version of ``python -m benchmarks.affinity``: real processes behind a real gateway."""

from pathlib import Path

from benchmarks.affinity import measure, workload
from benchmarks.transfer_models import make_model


async def test_repeated_images_are_found_again_and_both_encoders_work(tmp_path: Path) -> None:
    model = make_model(
        tmp_path / "model", hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, vision_hidden=32
    )
    pictures = workload(40, seed=3)
    figures = await measure(model, 2, 1, pictures, concurrency=4)
    assert figures["of_ideal"] >= 0.95
    assert min(figures["pixels"]) > 0
