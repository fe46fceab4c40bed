"""Device memory of an instance that changes its role, on an accelerator whose memory is counted."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chip.chip  # noqa: F401 - makes its device known
import pytest
import tiny_models

from device.registry import get_device
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.engine.emulated.digests import LAYER_BYTES
from epd_serve.instance.instance import Instance
from epd_serve.types import Role

DEVICE = "chip:9"  # other tests of this process have other kinds at lower ones


@contextmanager
def without_collection() -> Iterator[None]:
    """Memory has to come back when nobody needs it, not when the collector of cycles runs by chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Lingering(ThreadPoolExecutor):
    """Its threads refer to what they have called a little longer than until its end, as any thread may."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[Any] = deque(maxlen=2)

    def submit(self, call: Any, /, *args: Any, **named: Any) -> Any:
        self.latest.append((call, args, named))
        return super().submit(call, *args, **named)


@pytest.mark.parametrize("role", ["P", "D"])
async def test_the_host_s_side_of_the_kv_is_bounded(role: str) -> None:
    """However much KV the device has; a cell stands for K and V of a block in a layer of the model."""
    options = InstanceOptions(
        name="x0",
        role=Role.parse(role),
        model=ShapeConfig(shape_of="qwen2.5-vl-7b"),
        served_model_name="tested",
        port=0,
        device="emulated:h200:0",
    )
    instance = Instance(options)
    await instance.start()
    try:
        assert instance.language is not None
        memory: Any = instance.language.weights.memory
        num_cells = memory.region.nbytes // LAYER_BYTES
        assert memory.nbytes(num_cells, 1) <= 256 * 2**20
        assert memory.nbytes(memory.layout.num_layers, memory.num_blocks) > 64 * 2**30
        budgets = instance.info().budgets
        assert (budgets["max_num_seqs"], budgets["max_num_batched_tokens"]) == (256, 8192), "by the H200's memory"
        assert budgets["feature_cache_bytes"] == 2 << 30
    finally:
        await instance.close()


@pytest.mark.parametrize(
    ("role", "other"), [pytest.param("P", "E", id="P"), pytest.param("PD", "E", id="PD", marks=pytest.mark.slow)]
)
async def test_a_role_leaves_nothing_on_the_device(role: str, other: str, tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    options = InstanceOptions(
        name="x0",
        role=Role.parse(role),
        model=model,
        served_model_name="tested",
        port=0,
        device=DEVICE,
        dtype="float32",
        threads=1,
        num_blocks=512,
        feature_cache_bytes=1 << 16,
        max_model_len=512,
        switch_dir=tmp_path,
    )
    device = get_device(DEVICE)

    def used() -> int:
        total, free = device.memory()
        return total - free

    asyncio.get_running_loop().set_default_executor(Lingering())
    instance = Instance(options)
    await instance.start()
    try:
        with without_collection():
            first = used()
            device.reset_peak_memory()
            for _ in range(2):
                await instance.rebuild(Role.parse(other))
                between = used()
                await instance.rebuild(Role.parse(role))
            assert used() <= first + 65536, f"{used()} bytes where {first} were"
            assert other == "D" or between < first, f"E keeps {between} of {first} bytes"
            most = max(first, between)
            assert device.peak_memory() < 1.5 * most, (
                f"both at once: {device.peak_memory()} bytes, {first} and {between} of each"
            )
        weights: Any = instance.language and instance.language.weights
        logits = (
            4 * instance.options.sizes.max_num_seqs * instance.family.config.get_text_config().vocab_size
            if role == "PD"
            else 0
        )
        assert logits < weights.step_bytes(instance.options, weights.memory.layout) < 1 << 30
        assert used() <= first + 65536, "what was measured is free again"
    finally:
        await instance.close()
