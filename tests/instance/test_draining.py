"""An instance that drains refuses new requests and answers those that it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_models
from fleet import wait_until
from in_process import serving

from epd_serve.errors import Unavailable
from epd_serve.protocol import wire
from epd_serve.rpc.items import END, pack
from epd_serve.rpc.link import MAX_BODY_BYTES, Link


async def test_draining_refuses_what_is_new_and_waits_for_the_rest(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(path, "EPD") as instance, Link("epd", instance.url) as link:
        request = wire.PrefillRequest(
            request_id="r",
            output=wire.OutputOptions(kind="completion", id="r", created=0, model="tiny", stream=True),
            sampling=wire.SamplingParams(seed=0, max_tokens=200, ignore_eos=True),
            items=[],
            prompt="apple",
        )
        running = asyncio.create_task(link.ask("/stage/prefill", [wire.encode(request)], MAX_BODY_BYTES))
        await asyncio.to_thread(wait_until, lambda: instance.in_use()["sequences"] > 0, "it runs")
        drained = asyncio.create_task(instance.drained())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as refused:
            await link.ask("/stage/prefill", [wire.encode(request)])
        assert refused.value.code == "draining"
        assert not instance.info().ready
        await drained
        assert (await running).endswith(pack(END, [], b"data: [DONE]\n\n"))
