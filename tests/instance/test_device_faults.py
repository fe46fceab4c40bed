"""Faults of a device, injected into an emulated one: a clear error in time, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest
import tiny_models
from fleet import Books, wait_until
from services import serving

from device.emulated.timeline import EMULATED_FAULTS
from epd_serve.errors import WEDGED, ServeError
from epd_serve.protocol import wire

DEVICE = "emulated:a100:11"


def prompt(name: str) -> bytes:
    return wire.encode(
        wire.PrefillRequest(
            request_id=name,
            output=wire.OutputOptions(kind="completion", id=name, created=0, model="tiny", stream=False),
            sampling=wire.SamplingParams(seed=0, max_tokens=8, temperature=0.0, ignore_eos=True),
            items=[],
            prompt="apple",
        )
    )


async def test_a_device_that_hangs_and_one_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = tmp_path / "faults.json"
    monkeypatch.setenv(EMULATED_FAULTS, str(faults))
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")

    def inject(text: str) -> None:
        faults.write_text(text)
        os.utime(faults, ns=(0, time.monotonic_ns()))

    async with (
        serving(model, "EPD", device=DEVICE) as instance,
        httpx.AsyncClient(base_url=instance.url, timeout=60) as client,
    ):

        async def ask(name: str) -> httpx.Response:
            return await client.post("/stage/prefill", content=prompt(name))

        healthy = await ask("healthy")
        await instance.probe(60)

        inject(f'{{"{DEVICE}": {{"hangs": true}}}}')
        stuck = asyncio.create_task(ask("stuck"))
        await asyncio.to_thread(wait_until, lambda: instance.in_use()["sequences"] > 0, "it runs")
        with pytest.raises(ServeError, match=r"in 1 s") as error:
            await instance.probe(1)
        assert error.value.code == WEDGED and not stuck.done()
        language, instance.language = instance.language, None
        with pytest.raises(ServeError, match=r"the tower computed nothing in 1 s"):  # though it was launched
            await instance.probe(1)
        instance.language = language
        inject("")
        assert (await stuck).content.replace(b"stuck", b"healthy") == healthy.content, "it goes on where it was"
        await instance.probe(60)
        await Books({"epd": instance.url}).check()

        ended = list[str]()
        monkeypatch.setattr(instance, "end_process", lambda: ended.append("process"))
        inject(f'{{"{DEVICE}": {{"lost": true}}}}')
        lost = await ask("lost")
        assert lost.status_code == 500 and f"{DEVICE} is lost" in lost.text
        assert ended and any("is lost" in text and "this process ends" in text for text in caplog.messages)
        ended.clear()
        instance.language = None
        with pytest.raises(ServeError, match=rf"{DEVICE} is lost") as error:
            await instance.probe(60)
        assert error.value.code == WEDGED and ended, "an encoder that is idle ends, too"
        instance.language = language
        await Books({"epd": instance.url}).check()
