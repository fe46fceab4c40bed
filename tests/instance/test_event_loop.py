"""A large image and a long prompt hold up neither the event loop nor what else goes over it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from links import linked
from pictures import noise
from torch import Tensor
from towers import TowerModel
from transformers import AutoTokenizer

from device.registry import get_device
from epd_serve.engine.computing import SampledToken
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import TowerStream
from epd_serve.engine.engine import Listeners, TokenEvent
from epd_serve.instance.answer import Answer, Generation
from epd_serve.instance.encode import EncodeService
from epd_serve.instance.loading.language_weights import read_texts
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.instance.text.prompt import PromptProcessor
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.instance.text.tokenizer import Vocabulary
from epd_serve.models.family import TowerInputs
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link
from epd_serve.rpc.server import Reply
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.types import SamplingParams

#: Far above what is measured (below 5 ms), far below what the work would take on the loop.
BOUND_S = 0.03
#: As of a 4K image in a model of 7 B parameters.
FEATURE_SHAPE = (8000, 3584)


OUTPUT = wire.OutputOptions(kind="chat", id="r", created=0, model="m", stream=True)


class Engine:
    def stop_sequence(self, sequence: Sequence) -> None:
        raise AssertionError("no stop string comes")


class Tower:
    num_parameters, pixel_bytes = 0, 0.0

    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        return [torch.zeros(FEATURE_SHAPE, dtype=torch.bfloat16) for _ in batch]


class Peers:
    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        return b""


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Yields a list that has the longest time for which the loop gave no turn, once the context is left.

    In CPU time of its thread, so that other processes do not count; nor does what other tests have left to the
    garbage collector.
    """
    gc.collect()
    gc.freeze()
    found: list[float] = []

    async def probe() -> None:
        worst, last = 0.0, time.thread_time()
        try:
            while True:
                await asyncio.sleep(0.001)
                now = time.thread_time()
                worst, last = max(worst, now - last), now
        finally:
            found.append(worst)

    task = asyncio.create_task(probe())
    await asyncio.sleep(0.01)
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.unfreeze()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")


async def test_a_4k_image(model: Path) -> None:
    family = load_family(model)
    buffer = BytesIO()
    noise(1, (3840, 2160)).save(buffer, "JPEG", quality=90)
    request = wire.EncodeRequest("r", wire.MediaRef("h" * 64, 3840, 2160), buffer.getvalue(), "http://p")
    body = wire.encode(request)
    transport = EmbeddedTransport(path="shm")
    store = EmbeddedFeatureStore(transport, 1 << 27)
    processor = RequestProcessor(1, queue_timeout_s=60)
    parts: list[Any] = [TowerModel(Tower(), family), Peers()]
    stream = TowerStream(get_device("cpu"), DeviceBoard(None, 0, time.monotonic))
    service = EncodeService(
        *parts,
        processor=processor,
        stream=stream,
        device=get_device("cpu"),
        telemetry=InstanceTelemetry("e0"),
        url="http://e",
        feature_timeout_s=300,
    )
    service.serve(store, None, image_budget_pixels=1)

    async def encode(received: bytes) -> Reply:
        return Reply(body=wire.encode(await service.encode(wire.decode(received, wire.EncodeRequest))))

    try:
        async with linked({"/stage/encode": encode}) as url, Link("e0", url) as link, lag() as found:
            start = time.monotonic()
            await link.ask("/stage/encode", [body])
            took_s = time.monotonic() - start
        store.check_integrity()
        print(f"{len(body)} bytes in {took_s:.3f} s, loop held for {found[0] * 1e3:.1f} ms")
        assert found[0] < BOUND_S < took_s
    finally:
        await processor.close()
        await service.close()
        transport.close()


async def test_a_prompt_of_4k_tokens_and_its_hand_over(model: Path) -> None:
    family = load_family(model)
    language = LanguageModel(model, torch.float32, get_device("cpu"))
    texts = read_texts(model, family)
    prompts = PromptProcessor(texts, family, language.inner, max_model_len=1 << 15, block_size=16)
    processor = RequestProcessor(1, queue_timeout_s=60)
    request = wire.PrefillRequest(
        request_id="r",
        output=OUTPUT,
        sampling=SamplingParams(seed=0),
        items=[wire.MediaRef("h" * 64, 300, 200)],
        messages=[wire.ChatMessage("user", [wire.Part("image"), wire.Part("text", "apple tree house " * 700)])],
    )
    body = wire.encode(request)
    try:
        async with lag() as found:
            request = wire.decode(body, wire.PrefillRequest)
            prompt = await processor.run("text", 0.0, prompts.process, request)
            await asyncio.sleep(0)
            handoff = wire.Handoff("t", "r", prompt.ids, 0, request.sampling, 8, OUTPUT, [wire.FirstToken(5)])
            handoff = wire.decode(wire.encode(handoff), wire.Handoff)
            Answer(prompts.vocabulary, OUTPUT, request.sampling, handoff.prompt_ids)
        print(f"{len(prompt.ids)} tokens, loop held for {found[0] * 1e3:.1f} ms")
        assert len(prompt.ids) > 4000
        assert found[0] < BOUND_S
    finally:
        await processor.close()


async def test_a_step_of_256_sequences(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    listeners, engine = Listeners(), Engine()
    sequences = [
        Sequence(
            request_id=str(number),
            prompt_ids=list(range(100, 120)),
            sampling=SamplingParams(seed=0, stop=("never", "ever")),
            max_tokens=100,
            positions=None,
        )
        for number in range(256)
    ]
    for sequence in sequences:
        answer = Answer(Vocabulary(tokenizer), OUTPUT, sequence.sampling, sequence.prompt_ids)
        listeners.listen(sequence.request_id, Generation(answer, engine).feed)  # type: ignore[arg-type]
    async with lag() as found:
        for token_id in range(200, 210):
            listeners.dispatch([TokenEvent(sequence, SampledToken(token_id), None) for sequence in sequences])
            await asyncio.sleep(0.01)
    print(f"loop held for {found[0] * 1e3:.1f} ms")
    assert found[0] < BOUND_S
