"""Faults of a device: a clear error in time, and nothing leaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_models
from chip.accelerator import ChipDevice
from fleet import Books
from http_client import http_client
from in_process import serving
from program import wait_until
from prompts import completion

from device.registry import get_device
from epd_serve.engine import pace
from epd_serve.errors import ServeError
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link

DEVICE = "chip:11"


async def test_a_device_that_hangs_and_one_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = get_device(DEVICE)
    assert isinstance(device, ChipDevice)
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")

    async with (
        serving(model, "EPD", device=DEVICE) as instance,
        http_client(instance.url) as client,
        Link("epd", instance.url) as link,
    ):

        async def ask(name: str) -> bytes:
            return await link.ask("/stage/prefill", [wire.encode(completion(name, max_tokens=8))])

        ended = list[str]()
        monkeypatch.setattr(pace, "end_process", lambda: ended.append("process"))
        monkeypatch.setattr(pace, "LEAST_S", 1.0)
        monkeypatch.setattr(pace, "FACTOR", 0.0)
        healthy = await ask("healthy")
        await ask("healthy again")  # steps of each kind are known

        device.chip.goes_on.clear()
        stuck = asyncio.create_task(ask("stuck"))
        await asyncio.to_thread(wait_until, lambda: bool(ended), "the step is taken for hung")
        assert not stuck.done() and "the language model hangs" in caplog.text
        assert (await client.get("/health")).status_code == 200, "the event loop is well"
        device.chip.goes_on.set()
        assert (await stuck).replace(b"stuck", b"healthy") == healthy, "it goes on where it was"
        await Books({"epd": instance.url}).check()

        ended.clear()
        device.chip.is_lost = True
        with pytest.raises(ServeError, match=f"{DEVICE} is lost"):
            await ask("lost")
        assert ended and any("is lost" in text and "this process ends" in text for text in caplog.messages)
        await Books({"epd": instance.url}).check()
