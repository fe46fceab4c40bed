"""A probe passes where something is computed, and says so where nothing is."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import tiny_models
from fleet import Books, wait_until
from services import serving

from epd_serve.errors import WEDGED, ServeError
from epd_serve.protocol import instance_state, wire
from epd_serve.protocol.frames import END, pack


async def test_a_probe_finds_what_an_answering_port_hides(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(path, "EPD") as instance:
        engine, tower = instance.language.engine, instance.encode  # type: ignore[union-attr]
        before = engine.num_steps
        await instance.probe(60)
        assert engine.num_steps > before
        async with httpx.AsyncClient(timeout=150) as client:
            asked = await client.post(
                f"{instance.url}/probe", content=wire.encode(instance_state.ProbeRequest(60.0))
            )
        assert asked.status_code == 204
        let_go = threading.Event()
        language = instance.language
        turn = language.turn  # type: ignore[union-attr]
        try:
            language.turn = lambda: (let_go.wait(), turn())[1]  # type: ignore[method-assign,union-attr]
            with pytest.raises(ServeError, match="no step") as error:
                await instance.probe(0.3)
            assert error.value.code == WEDGED
            let_go.set()
            language.turn = turn  # type: ignore[method-assign,union-attr]
            await instance.probe(60)
            let_go.clear()
            tower._tower_thread.submit(let_go.wait)
            with pytest.raises(ServeError, match="tower"):
                await instance.probe(0.3)
        finally:
            let_go.set()
        await instance.probe(60)
        server = tower._model.decoders._server
        assert server is not None
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        workers = children.read_text().split()  # noqa: ASYNC240
        try:
            for pid in (server.pid, *map(int, workers)):
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(ServeError, match="no item could be prepared") as error:
                await instance.probe(0.3)
            assert error.value.code == WEDGED
        finally:
            server.kill()
            await asyncio.to_thread(server.wait)
        await instance.probe(60)
        await Books({"epd": instance.url}).check()


async def test_a_batch_of_the_tower_that_takes_long_is_a_sign_of_life(tmp_path: Path) -> None:
    """On a busy machine a batch of all that came at once takes longer than a probe; its layers do not."""
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(path, "E") as instance:
        await instance.probe(60)
        tower, done = instance.encode, threading.Event()

        def batch() -> None:
            with tower._stream.encoding(1):
                while not done.wait(0.05):
                    tower._stream.between_layers()

        tower._tower_thread.submit(batch)
        try:
            await instance.probe(0.5)
        finally:
            done.set()
        await instance.probe(60)


async def test_draining_refuses_what_is_new_and_waits_for_the_rest(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(path, "EPD") as instance, httpx.AsyncClient(base_url=instance.url, timeout=150) as client:
        request = wire.PrefillRequest(
            request_id="r",
            output=wire.OutputOptions(kind="completion", id="r", created=0, model="tiny", stream=True),
            sampling=wire.SamplingParams(seed=0, max_tokens=200, ignore_eos=True),
            items=[],
            prompt="apple",
        )
        running = asyncio.create_task(client.post("/stage/prefill", content=wire.encode(request)))
        await asyncio.to_thread(wait_until, lambda: instance.in_use()["sequences"] > 0, "it runs")
        drained = asyncio.create_task(instance.drained())
        await asyncio.sleep(0)
        refused = await client.post("/stage/prefill", content=wire.encode(request))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert not instance.info().ready
        await drained
        answer = await running
        assert answer.status_code == 200 and answer.content.endswith(pack(END, [], b"data: [DONE]\n\n"))


async def test_what_waits_for_more_blocks_is_no_fault_of_the_engine(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(path, "PD", num_blocks=9) as instance:
        engine = instance.language.engine  # type: ignore[union-attr]
        held = engine.reserve(30, 1, [], time.monotonic())  # its KV is on the way: nothing is to be computed
        assert held is not None and engine.reserve(60, 1, [], time.monotonic()) is None
        assert engine.load().free_blocks >= 2
        await instance.probe(60)
        engine.unreserve(held)
        engine.stop_reserving()
        await instance.probe(60)
        await Books({"pd": instance.url}).check()
