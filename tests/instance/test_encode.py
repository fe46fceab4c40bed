"""The encode loop survives whatever a batch fails with; equal items are encoded once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import noise, png
from torch import Tensor
from towers import TowerModel

from device.registry import get_device
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import TowerStream
from epd_serve.errors import InstanceFailed, InvalidRequest, Unavailable
from epd_serve.instance.encode import EncodeService
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.models.family import TowerInputs
from epd_serve.protocol import wire
from epd_serve.telemetry.span import Span
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore


class Family:
    """Its processor makes every image one pixel."""

    token_ids: ClassVar = {"image": 1}

    def pixels_of(self, item: wire.MediaRef) -> int:
        return 1

    def of(self, item: wire.MediaRef) -> Self:
        return self

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        return {"pixel_values": torch.zeros(1, 1)}

    def blank_inputs(self, size: tuple[int, int]) -> TowerInputs:
        return {"pixel_values": torch.zeros(1, 1)}


class SlowFamily(Family):
    """Takes its time to prepare."""

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        time.sleep(_PREPARE_S)
        return super().preprocess(pixels)


class HeldFamily(Family):
    """Prepares when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        self.go.wait(60)
        return super().preprocess(pixels)


class Tower:
    """Fails once as no list of exceptions foresees, and once with too few features."""

    calls, pixel_bytes = 0, 0.0

    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("image_sizes")
        return [torch.ones(2, 3) for _ in batch][self.calls == 2 :]


class SlowTower:
    """Encodes when it is let go."""

    num_images, pixel_bytes = 0, 0.0

    def __init__(self) -> None:
        self.go = threading.Event()

    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        self.go.wait()
        self.num_images += len(batch)
        return [torch.ones(2, 3) for _ in batch]


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


PICTURE = noise(1)
_PREPARE_S = 0.05
REF = wire.MediaRef("h" * 64, *PICTURE.size)
HERE = "http://here"


def request(request_id: str, announce_to: str = "http://p") -> wire.EncodeRequest:
    return wire.EncodeRequest(request_id, REF, png(PICTURE), announce_to)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Bench:
    transport: EmbeddedTransport
    services: list[EncodeService]

    def service(
        self,
        tower: Any,
        peers: Peers,
        deliver_here: Callable[[str, wire.MediaRef, Tensor], Awaitable[None]] | None = None,
        *,
        image_budget_pixels: int = 1,
        family: Family | None = None,
        num_threads: int = 2,
        feature_timeout_s: float = 300,
        stream: TowerStream | None = None,
        may_start: Callable[[], bool] = lambda: True,
        telemetry: InstanceTelemetry | None = None,
    ) -> tuple[EncodeService, EmbeddedFeatureStore]:
        store = EmbeddedFeatureStore(self.transport, 1 << 12)
        parts: list[Any] = [TowerModel(tower, family or Family()), peers]
        service = EncodeService(
            *parts,
            processor=RequestProcessor(num_threads, queue_timeout_s=60),
            stream=stream or TowerStream(get_device("cpu"), DeviceBoard(None, 0, time.monotonic)),
            device=get_device("cpu"),
            telemetry=telemetry or InstanceTelemetry("e0"),
            url=HERE,
            feature_timeout_s=feature_timeout_s,
        )
        service.may_start = may_start
        service.serve(store, deliver_here, image_budget_pixels=image_budget_pixels)
        self.services.append(service)
        return service, store


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(EmbeddedTransport(path="shm"), [])
    yield bench
    for service in bench.services:
        await service.close()
    bench.transport.close()


async def test_a_batch_that_fails_takes_no_other_along(bench: Bench) -> None:
    service, store = bench.service(Tower(), Peers())
    for _ in range(2):
        with pytest.raises(InstanceFailed, match="the encoder failed"):
            await service.encode(request("r"))
    assert (await service.encode(request("r"))).num_tokens == 2
    assert store.num_owners == service.num_waiting == 0


async def test_requests_for_one_item_share_one_encode_and_outlive_each_other(bench: Bench) -> None:
    tower, peers = SlowTower(), Peers()
    service, store = bench.service(tower, peers)
    asked = [asyncio.create_task(service.encode(request(f"r{number}"))) for number in range(5)]
    await until(lambda: service.num_waiting == 1)
    asked[0].cancel()  # the one that began it
    await asyncio.gather(asked[0], return_exceptions=True)
    tower.go.set()
    replies = await asyncio.gather(*asked[1:])
    assert tower.num_images == 1
    assert [reply.num_tokens for reply in replies] == [2] * 4
    assert [event.request_id for event in peers.events] == ["r1", "r2", "r3", "r4"]
    assert {((event.item.width, event.item.height)) for event in peers.events} == {PICTURE.size}
    assert (await service.encode(request("r5"))).cached
    assert tower.num_images == 1, "the second time nothing is encoded"
    assert store.num_owners == service.num_waiting == 0
    store.check_integrity()


async def test_an_encode_that_nobody_wants_any_more_ends(bench: Bench) -> None:
    tower = SlowTower()
    service, store = bench.service(tower, Peers())
    asked = [asyncio.create_task(service.encode(request(f"r{number}"))) for number in range(3)]
    await asyncio.sleep(0.05)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert service.num_waiting == store.num_owners == 0
    tower.go.set()


async def test_what_the_store_cannot_deliver_goes_to_the_consumer_in_this_instance_directly(bench: Bench) -> None:
    delivered: list[tuple[str, wire.MediaRef, int]] = []

    async def deliver(request_id: str, ref: wire.MediaRef, feature: Tensor) -> None:
        delivered.append((request_id, ref, len(feature)))

    tower = SlowTower()
    tower.go.set()
    service, store = bench.service(tower, Peers(InstanceFailed("feature hhhh fails its checksum")), deliver)
    reply = await service.encode(request("r", HERE))
    assert (reply.cached, reply.num_tokens) == (False, 2)
    assert delivered == [("r", REF, 2)]
    with pytest.raises(InstanceFailed, match="checksum"):
        await service.encode(request("r", "http://p"))
    assert store.num_owners == 0


async def test_the_last_resort_waits_in_line_where_others_are_sent_away(bench: Bench) -> None:
    """An item that P encodes itself cannot go elsewhere; one of another consumer goes to the next encoder."""
    tower, family = SlowTower(), HeldFamily()
    tower.go.set()
    service, _ = bench.service(tower, Peers(), family=family, num_threads=1, feature_timeout_s=10)
    family.go.set()
    await service.encode(request("decoders are there"))
    family.go.clear()
    images = {who: wire.MediaRef(who[:1] * 63 + "-", *PICTURE.size) for who in ("first", "other", HERE)}
    asked = {
        who: asyncio.create_task(
            service.encode(wire.EncodeRequest(who, ref, png(PICTURE), HERE if who == HERE else "http://p"))
        )
        for who, ref in images.items()
    }
    with pytest.raises(Unavailable, match="within 2 s"):
        await asked["other"]
    family.go.set()
    assert (await asked["first"]).num_tokens == (await asked[HERE]).num_tokens == 2


async def test_an_image_that_cannot_be_decoded_is_not_tried_twice(bench: Bench) -> None:
    async def deliver(request_id: str, ref: wire.MediaRef, feature: Tensor) -> None:
        raise AssertionError("nothing to deliver")

    service, _ = bench.service(SlowTower(), Peers(), deliver)
    with pytest.raises(InvalidRequest):
        await service.encode(wire.EncodeRequest("r", REF, b"no image", HERE))


class Gate:
    """Says what it is told to say."""

    is_open = False
    num_asked = 0

    def may_start(self) -> bool:
        self.num_asked += 1
        return self.is_open


async def test_a_batch_waits_until_it_may_start_and_is_not_asked_for_meanwhile(bench: Bench) -> None:
    tower, gate = SlowTower(), Gate()
    tower.go.set()
    service, _ = bench.service(tower, Peers(), may_start=gate.may_start)
    asked = asyncio.create_task(service.encode(request("r")))
    await until(lambda: gate.num_asked == 1)
    await asyncio.sleep(0.05)
    assert (gate.num_asked, tower.num_images) == (1, 0)
    service.reconsider()
    await until(lambda: gate.num_asked == 2)
    await asyncio.sleep(0.05)
    assert (gate.num_asked, tower.num_images) == (2, 0), "asked again, still no"
    gate.is_open = True
    await asyncio.to_thread(service.reconsider)
    assert (await asyncio.wait_for(asked, 300)).num_tokens == 2
    service.reconsider()
    await asyncio.sleep(0.05)
    assert gate.num_asked == 3, "nothing waits: nothing to ask"


async def test_a_batch_counts_the_pixels_that_the_tower_sees(bench: Bench) -> None:
    """Images of hundreds of pixels, of which the processor leaves one each."""
    sizes: list[int] = []
    tower, gate = SlowTower(), Gate()
    tower.go.set()
    service, _ = bench.service(
        tower,
        Peers(),
        may_start=gate.may_start,
        image_budget_pixels=2,
        telemetry=(telemetry := InstanceTelemetry("e0")),
    )
    telemetry.spans.subscribe(
        lambda span: sizes.append(int(span.attributes["images"])) if span.name == "encode" else None
    )
    calls = [
        wire.EncodeRequest("r", wire.MediaRef(letter * 64, *PICTURE.size), png(PICTURE), "http://there")
        for letter in "abc"
    ]
    asked = [asyncio.create_task(service.encode(call)) for call in calls]
    await until(lambda: len(service._waiting) == 3)
    gate.is_open = True
    service.reconsider()
    await asyncio.wait_for(asyncio.gather(*asked), 300)
    assert sizes == [1, 2], "the first one alone, to be measured"


async def test_a_change_in_the_middle_of_the_question_is_not_lost(bench: Bench) -> None:
    """The gate opens, and says so, after it has said no and before the service has heard that."""
    tower, services = SlowTower(), list[EncodeService]()
    tower.go.set()
    answers = iter((False, True))

    def may_start() -> bool:
        answer = next(answers)
        thread = threading.Thread(target=services[0].reconsider)
        thread.start()
        thread.join()
        return answer

    service, _ = bench.service(tower, Peers(), may_start=may_start)
    services.append(service)
    assert (await asyncio.wait_for(service.encode(request("r")), 300)).num_tokens == 2


async def test_a_guard_that_fails_does_not_end_the_encoder(bench: Bench) -> None:
    def may_start() -> bool:
        raise OSError("the device does not say how much memory it has")

    tower = SlowTower()
    tower.go.set()
    service, _ = bench.service(tower, Peers(), may_start=may_start)
    assert (await asyncio.wait_for(service.encode(request("r")), 300)).num_tokens == 2


class ReadyTower:
    """Encodes at once."""

    pixel_bytes = 0.0

    def encode(self, batch: list[TowerInputs]) -> list[Tensor]:
        return [torch.ones(2, 3) for _ in batch]


@pytest.mark.parametrize("held", [False, True])
async def test_an_encoder_is_busy_with_what_it_prepares_and_with_no_second_twice(
    bench: Bench, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, asked_whether, spans, busy_s = SlowTower(), threading.Event(), list[Span](), list[float]()
    tower.go.set()
    may = [not held]

    def may_start() -> bool:
        asked_whether.set()
        return may[0]

    def note(num_pixels: int, seconds: float) -> None:
        busy_s.append(seconds)

    service, _ = bench.service(
        tower,
        Peers(),
        family=SlowFamily(),
        may_start=may_start,
        telemetry=(telemetry := InstanceTelemetry("e0")),
        image_budget_pixels=1,
    )
    telemetry.spans.subscribe(lambda span: spans.append(span) if span.name == "encode" else None)
    monkeypatch.setattr(telemetry.rates, "encoded", note)
    since_s = time.monotonic()
    refs = [wire.MediaRef(name * 64, *PICTURE.size) for name in "ab"]
    asked = [
        asyncio.create_task(service.encode(wire.EncodeRequest("r", ref, png(PICTURE), "http://p"))) for ref in refs
    ]
    if held:
        await until(asked_whether.is_set)
        may[0] = True
        service.reconsider()
    await asyncio.gather(*asked)
    [first, second] = zip([span.end_s - span.start_s for span in spans], busy_s, strict=True)
    assert first[1] == first[0] if held else first[1] >= first[0] + _PREPARE_S
    assert second[1] >= second[0]
    assert first[1] + second[1] <= time.monotonic() - since_s
