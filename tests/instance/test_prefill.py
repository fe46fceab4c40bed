"""The prefill side of the hand-off: nothing is written after a lease, and nothing waits for what will not come."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hand_off import Peers, Tokenizer, transfers

from epd_serve.engine.computing import SampledToken
from epd_serve.engine.engine import PromptEvent
from epd_serve.errors import InstanceFailed, InvalidRequest, ServeError, Unavailable
from epd_serve.instance.calls import CleanUps
from epd_serve.instance.feature_receiver import ORPHAN_S, FeatureForm, FeatureReceiver
from epd_serve.instance.prefill import Prefiller
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.protocol import wire
from epd_serve.rpc.server import BrokenStream
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.types import SamplingParams

RESERVED = wire.encode(wire.ReserveReply(block_ids=[1], num_cached_blocks=0, name="d0"))
LEASE_S = 0.6


class Engine:
    """Takes prompts and computes none."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Sequence, OutgoingTransfer]] = []
        self.busy = asyncio.Event()

    def check_fits(self, *arguments: int) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def wake(self) -> None: ...

    eos_token_ids = frozenset[int]()

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer) -> None:
        self.submitted.append((sequence, transfer))
        self.busy.set()


class Prompts:
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def estimate(self, request: wire.PrefillRequest, num_characters: int) -> int:
        return 0

    tokenizer = Tokenizer()

    def check_size(self, request: wire.PrefillRequest) -> int:
        return 0

    def segments(self, items: list[wire.MediaRef]) -> list[wire.MediaRef]:
        return items

    def process(self, request: wire.PrefillRequest) -> Sequence:
        assert self.go_on.wait(60)
        return Sequence(
            request_id=request.request_id,
            prompt_ids=[1, 2, 3],
            positions=None,
            max_tokens=4,
            sampling=request.sampling,
            hand_off=request.decode_url is not None,
        )


class Bench:
    def __init__(self, peers: Peers) -> None:
        self.now = 0.0
        self.engine = Engine()
        self.prompts = Prompts()
        self.transport = EmbeddedTransport(path="shm")
        self.store = EmbeddedFeatureStore(self.transport, 4096)
        family: Any = SimpleNamespace(num_tokens=lambda item: 1)
        engine: Any = self.engine
        self.clean_ups, telemetry = CleanUps(), InstanceTelemetry("p0")
        self.receiver = FeatureReceiver(
            self.store,
            engine,
            telemetry.metrics,
            FeatureForm(dtype="float32", width=1, family=family),
            capacity_bytes=4096,
            timeout_s=5,
            clock=lambda: self.now,
        )
        parts: dict[str, Any] = {"engine": self.engine, "prompts": self.prompts}
        self.service = Prefiller(
            **parts,
            receiver=self.receiver,
            transfers=transfers(
                peers, engine=self.engine, clean_ups=self.clean_ups, telemetry=telemetry, lease_s=LEASE_S
            ),
            processor=RequestProcessor(1, queue_timeout_s=60, spans=telemetry.spans),
            compiler=None,
            timeline=telemetry.timeline,
        )

    async def close(self) -> None:
        await self.clean_ups.finish()
        self.transport.close()


def request(items: list[wire.MediaRef] | None = None, decode_url: str | None = "http://d") -> wire.PrefillRequest:
    return wire.PrefillRequest(
        request_id="r",
        output=wire.OutputOptions(kind="chat", id="r", created=0, model="m", stream=True),
        sampling=SamplingParams(seed=0),
        items=items or [],
        prompt="x",
        decode_url=decode_url,
    )


async def test_a_lease_that_is_not_renewed_fails_the_request() -> None:
    async def renew() -> bytes:
        if bench.engine.submitted:  # else the answer to the reservation was late
            raise Unavailable("the transfer has ended")
        return b""

    peers = Peers(reserve=RESERVED, renew=renew)
    bench = Bench(peers)
    with pytest.raises(InstanceFailed, match="the transfer has ended"):
        await asyncio.wait_for(bench.service.prefill(request()), 300)
    await bench.close()
    assert peers.calls[-1] == "/kv/cancel"


async def test_a_transfer_that_was_stopped_is_not_completed() -> None:
    """Whatever made the renewal fail: D may still take a hand-over, and some of the KV was not written."""
    is_computed = False

    async def renew() -> bytes:
        if is_computed:
            raise ServeError("out of memory")
        return b""

    peers = Peers(reserve=RESERVED, renew=renew)
    bench = Bench(peers)
    working = asyncio.create_task(bench.service.prefill(request()))
    await asyncio.wait_for(bench.engine.busy.wait(), 300)
    sequence, transfer = bench.engine.submitted[0]
    receiver = bench.service.receiver_of("r")
    assert receiver is not None
    receiver.feed(PromptEvent(sequence, [(SampledToken(5), None)]))
    is_computed = True
    reply = await working
    async with asyncio.timeout(300):
        while not transfer.cancelled:  # by the renewal  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert reply.stream is not None
    with pytest.raises(BrokenStream):
        _ = [piece async for piece in reply.stream]
    await bench.close()
    assert "/kv/complete" not in peers.calls
    assert "/kv/cancel" in peers.calls


async def test_features_that_come_before_a_slow_tokenizer_is_done_are_kept() -> None:
    bench = Bench(Peers())
    bench.prompts.go_on.clear()
    store = bench.store
    items = [wire.MediaRef("a", 1, 1), wire.MediaRef("b", 1, 1)]
    working = asyncio.create_task(bench.service.prefill(request(items)))
    await asyncio.sleep(0.05)
    for item in items:
        feature = await store.put(item.mm_hash, memoryview(bytes(4)), [1, 1], "float32", "r")
        assert feature is not None
        await bench.receiver.receive(store.event(item.mm_hash, feature, "r"))
        bench.now += 2 * ORPHAN_S
        bench.receiver.expire()
    assert bench.receiver.num_owners == 1
    assert all(bench.receiver.has(item.mm_hash) for item in items)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert bench.receiver.num_owners == 0
    bench.prompts.go_on.set()
    await bench.close()


async def test_a_prompt_that_is_sent_twice_is_computed_once() -> None:
    bench = Bench(Peers(reserve=RESERVED))
    working = asyncio.create_task(bench.service.prefill(request()))
    await asyncio.wait_for(bench.engine.busy.wait(), 300)
    with pytest.raises(InvalidRequest, match="being served already"):
        await bench.service.prefill(request())
    assert len(bench.engine.submitted) == 1
    assert not working.done(), "the first goes on"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await bench.close()
