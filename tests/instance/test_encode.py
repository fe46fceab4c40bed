"""The encoder survives whatever a batch fails with; equal items are encoded once; batches start when they may."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from pictures import noise, png
from program import until
from torch import Tensor
from towers import TowerModel

from device.registry import get_device
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import TowerStream
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import InstanceFailed, InvalidRequest
from epd_serve.instance.encode import Encoder
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.models.family import TowerInputs
from epd_serve.models.loader import load_family
from epd_serve.protocol import wire
from epd_serve.telemetry.span import Span
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore


class Family:
    """Its processor makes every image one pixel, when it may, and takes its time."""

    token_ids: ClassVar = {"image": 1}

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.go = threading.Event()
        self.go.set()

    def pixels_of(self, item: wire.MediaRef) -> int:
        return 1

    def num_tokens(self, item: wire.MediaRef) -> int:
        return 2

    def of(self, item: wire.MediaRef) -> Self:
        return self

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        self.go.wait(60)
        time.sleep(self.seconds)
        return {"pixel_values": torch.zeros(1, 1)}


class Tower:
    """Encodes when it may; ``failures`` say what its first calls do."""

    def __init__(self, *failures: Exception | int) -> None:
        self.failures = list(failures)
        self.go = threading.Event()
        self.go.set()
        self.num_images = 0

    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        self.go.wait(60)
        self.num_images += len(batch)
        failure = self.failures.pop(0) if self.failures else 0
        if isinstance(failure, Exception):
            raise failure
        return [torch.ones(2, 3) for _ in batch][failure:]


@dataclass
class Peers:
    """A prefill instance that takes what is announced, or refuses it."""

    refusal: Exception | None = None
    events: list[wire.FeatureEvent] = field(default_factory=list)

    async def call(self, url: str, path: str, message: wire.FeatureEvent, timeout_s: float | None = None) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        self.events.append(message)
        return b""


@dataclass
class Consumer:
    """Takes features of this instance's own requests."""

    taken: list[tuple[str, wire.MediaRef, int]] = field(default_factory=list)

    async def take(self, request_id: str, ref: wire.MediaRef, feature: Tensor) -> None:
        self.taken.append((request_id, ref, len(feature)))


class Gate(TowerStream):
    """Lets batches start when it is open."""

    is_open = True
    num_asked = 0

    def may_start(self, num_pixels: int) -> bool:
        self.num_asked += 1
        return self.is_open


PICTURE = noise(1)
PREPARE_S = 0.05
REF = wire.MediaRef("h" * 64, *PICTURE.size)
HERE = "http://here"


def request(request_id: str, announce_to: str = "http://p", ref: wire.MediaRef = REF) -> wire.EncodeRequest:
    return wire.EncodeRequest(request_id, ref, png(PICTURE), announce_to)


@dataclass
class Bench:
    transport: EmbeddedTransport
    encoders: list[Encoder] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    telemetry: InstanceTelemetry = field(default_factory=lambda: InstanceTelemetry("e0"))

    def __post_init__(self) -> None:
        self.store = EmbeddedFeatureStore(self.transport, 1 << 26)
        self.telemetry.spans.subscribe(lambda span: self.spans.append(span) if span.name == "encode" else None)

    def encoder(
        self,
        tower: Tower,
        peers: Peers | None = None,
        *,
        kind: type[TowerStream] = Gate,
        family: Any = None,
        image_budget_pixels: int = 1,
        num_threads: int = 2,
    ) -> Any:
        parts: list[Any] = [TowerModel(tower, family or Family()), peers or Peers()]
        encoder = Encoder(
            *parts,
            processor=RequestProcessor(num_threads, queue_timeout_s=60, spans=self.telemetry.spans),
            stream=kind(get_device("cpu"), DeviceBoard(None, 0, time.monotonic)),
            device=get_device("cpu"),
            telemetry=self.telemetry,
            url=HERE,
        )
        encoder.serve(self.store, image_budget_pixels)
        self.encoders.append(encoder)
        return encoder


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(EmbeddedTransport(path="shm"))
    yield bench
    for encoder in bench.encoders:
        await encoder.close()
    bench.transport.close()


async def test_a_batch_that_fails_takes_no_other_along(bench: Bench) -> None:
    peers = Peers()
    encoder = bench.encoder(Tower(KeyError("image_sizes"), 1), peers)
    for _ in range(2):
        with pytest.raises(InstanceFailed, match="the encoder failed"):
            await encoder.encode(request("r"))
    await encoder.encode(request("r"))
    assert [event.shape for event in peers.events] == [[2, 3]]
    assert bench.store.num_owners == encoder.num_waiting == 0


async def test_requests_for_one_item_share_one_encode_and_outlive_each_other(bench: Bench) -> None:
    tower, peers = Tower(), Peers()
    tower.go.clear()
    encoder = bench.encoder(tower, peers)
    nobody = asyncio.create_task(encoder.encode(request("s", ref=wire.MediaRef("s" * 64, *PICTURE.size))))
    asked = [asyncio.create_task(encoder.encode(request(f"r{number}"))) for number in range(5)]
    await until(lambda: encoder.num_waiting == 2)
    for leaving in (nobody, asked[0]):  # the one that began it
        leaving.cancel()
    await asyncio.gather(nobody, asked[0], return_exceptions=True)
    assert encoder.num_waiting == 1, "an encode that nobody wants any more ends"
    tower.go.set()
    await asyncio.gather(*asked[1:])
    assert tower.num_images == 1
    assert [event.request_id for event in peers.events] == ["r1", "r2", "r3", "r4"]
    assert [event.shape for event in peers.events] == [[2, 3]] * 4
    assert {(event.item.width, event.item.height) for event in peers.events if event.item} == {PICTURE.size}
    assert (await encoder.encode(request("r5"))).cached
    assert tower.num_images == 1, "the second time nothing is encoded"
    assert bench.store.num_owners == encoder.num_waiting == 0
    bench.store.check_integrity()


async def test_what_the_store_cannot_deliver_goes_to_the_consumer_in_this_instance_directly(bench: Bench) -> None:
    encoder = bench.encoder(Tower(), Peers(InstanceFailed("feature hhhh fails its checksum")))
    encoder.consumer = Consumer()
    assert not (await encoder.encode(request("r", HERE))).cached
    assert encoder.consumer.taken == [("r", REF, 2)]
    with pytest.raises(InstanceFailed, match="checksum"):
        await encoder.encode(request("r"))
    with pytest.raises(InvalidRequest):  # a picture that cannot be decoded is not tried twice
        await encoder.encode(wire.EncodeRequest("s", wire.MediaRef("s" * 64, *PICTURE.size), b"no image", HERE))
    assert len(encoder.consumer.taken) == 1 and bench.store.num_owners == 0


async def test_a_batch_waits_until_it_may_start_and_counts_the_pixels_that_the_tower_sees(bench: Bench) -> None:
    """Images of hundreds of pixels, of which the processor leaves one each."""
    tower = Tower()
    encoder = bench.encoder(tower, image_budget_pixels=2)
    encoder.stream.is_open = False
    refs = [wire.MediaRef(letter * 64, *PICTURE.size) for letter in "abc"]
    asked = [asyncio.create_task(encoder.encode(request("r", ref=ref))) for ref in refs]
    await until(lambda: len(encoder._waiting) == 3)
    num_asked = encoder.stream.num_asked
    encoder.stream.reconsider()
    await until(lambda: encoder.stream.num_asked == num_asked + 1)
    assert tower.num_images == 0, "asked again, still no"
    encoder.stream.is_open = True
    await asyncio.to_thread(encoder.stream.reconsider)
    await asyncio.wait_for(asyncio.gather(*asked), 300)
    assert [span.attributes["images"] for span in bench.spans] == [1, 2], "the first one alone, to be measured"
    assert encoder.stream.held_on is None, "nothing waits: nothing to ask"


async def test_segments_of_a_video_do_not_wait_for_each_other(bench: Bench) -> None:
    encoder = bench.encoder(Tower(), image_budget_pixels=9)
    encoder.stream.is_open = False
    segments = wire.MediaRef("v" * 64, *PICTURE.size, num_segments=3).segments
    asked = [asyncio.create_task(encoder.encode(request("r", ref=ref))) for ref in segments]
    await until(lambda: len(encoder._waiting) == 3)
    encoder.stream.is_open = True
    await asyncio.to_thread(encoder.stream.reconsider)
    await asyncio.wait_for(asyncio.gather(*asked), 300)
    assert [span.attributes["images"] for span in bench.spans] == [1, 1, 1]


class ChangesItsMind(TowerStream):
    """Opens, and says so, after it has said no and before the encoder has heard that."""

    answers = (False, True)

    def may_start(self, num_pixels: int) -> bool:
        answer, *rest = self.answers
        self.answers = tuple(rest)
        thread = threading.Thread(target=self.reconsider)
        thread.start()
        thread.join()
        return answer


class NoAnswer(TowerStream):
    def may_start(self, num_pixels: int) -> bool:
        raise OSError("the device does not say how much memory it has")


@pytest.mark.parametrize("kind", [ChangesItsMind, NoAnswer])
async def test_an_encoder_starts_whatever_happens_to_the_question(bench: Bench, kind: type[TowerStream]) -> None:
    peers = Peers()
    await asyncio.wait_for(bench.encoder(Tower(), peers, kind=kind).encode(request("r")), 300)
    assert [event.shape for event in peers.events] == [[2, 3]]


@pytest.mark.parametrize("held", [False, True])
async def test_an_encoder_is_busy_with_what_it_prepares_and_with_no_second_twice(bench: Bench, held: bool) -> None:
    encoder = bench.encoder(Tower(), family=Family(PREPARE_S), image_budget_pixels=1)
    encoder.stream.is_open = not held
    since_s = time.monotonic()
    refs = [wire.MediaRef(name * 64, *PICTURE.size) for name in "ab"]
    asked = [asyncio.create_task(encoder.encode(request("r", ref=ref))) for ref in refs]
    if held:
        await until(lambda: encoder.stream.num_asked > 0)
        encoder.stream.is_open = True
        encoder.stream.reconsider()
    await asyncio.gather(*asked)
    computed_s = sum(span.end_s - span.start_s for span in bench.spans)
    busy_s = bench.telemetry.rates.busy_s["E"]
    assert busy_s >= computed_s + (0 if held else PREPARE_S)
    assert busy_s <= time.monotonic() - since_s


#: Far above the times that are measured (below 5 ms), far below what the work would take on the loop.
BOUND_S = 0.03


class LargeTower(Tower):
    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        """As of a 4K image in a model of 7 B parameters."""
        return [torch.zeros((8000, 3584), dtype=torch.bfloat16) for _ in batch]


async def test_a_4k_image_does_not_hold_up_the_event_loop(bench: Bench, tmp_path: Path) -> None:
    """In CPU time of its thread, so that other processes do not count."""
    family = load_family(tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model"))
    peers, buffer, lags = Peers(), BytesIO(), list[float]()
    encoder = bench.encoder(LargeTower(), peers, family=family)
    noise(1, (3840, 2160)).save(buffer, "JPEG", quality=90)
    whole = wire.EncodeRequest("r", wire.MediaRef("h" * 64, 3840, 2160), buffer.getvalue(), "http://p")
    gc.collect()
    gc.freeze()  # garbage of other tests does not count

    async def probe() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            lags.append(now - last)
            last = now

    probing = asyncio.create_task(probe())
    await asyncio.sleep(0.01)
    await encoder.encode(wire.decode(wire.encode(whole), wire.EncodeRequest))
    probing.cancel()
    gc.unfreeze()
    assert [event.shape for event in peers.events] == [[8000, 3584]] and max(lags) < BOUND_S
