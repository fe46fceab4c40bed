"""The prefill side of the hand-off: who is to blame, who is waited for, and what is not handed over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from garbage import garbage
from hand_off import REGION, Peers, Tokenizer, handoff, prefill_service
from program import until
from prompts import completion

from epd_serve.engine.engine import Outbox, PromptEvent, SampledToken
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import (
    DECODE_DRAINING,
    PEER_UNREACHABLE,
    InstanceFailed,
    InvalidRequest,
    ServeError,
    Unavailable,
)
from epd_serve.instance.calls import CleanUps, Refusals
from epd_serve.instance.feature_receiver import ORPHAN_S, FeatureForm, FeatureReceiver
from epd_serve.instance.prefill import KVDelivery
from epd_serve.protocol import wire
from epd_serve.rpc.server import BrokenStream
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.transfer.transport import PeerGone, TransferError
from epd_serve.types import SamplingParams

RESERVED = wire.encode(wire.ReserveReply(block_ids=[1], num_cached_blocks=0, name="d0"))
LEASE_S = 0.6


class Engine:
    """Takes prompts and computes none."""

    eos_token_ids = frozenset[int]()

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.submitted: list[tuple[Sequence, OutgoingTransfer]] = []
        self.busy = asyncio.Event()

    def check_fits(self, *arguments: int) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def wake(self) -> None: ...

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer) -> None:
        self.submitted.append((sequence, transfer))
        self.busy.set()


def prompt() -> Sequence:
    return Sequence(
        request_id="r",
        prompt_ids=[1, 2, 3],
        positions=None,
        max_tokens=4,
        sampling=SamplingParams(seed=0),
        hand_off=True,
    )


class Prompts:
    tokenizer = Tokenizer()

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def estimate(self, request: wire.PrefillRequest, num_characters: int) -> int:
        return 0

    def check_size(self, request: wire.PrefillRequest) -> int:
        return 0

    def segments(self, items: list[wire.MediaRef]) -> list[wire.MediaRef]:
        return items

    def process(self, request: wire.PrefillRequest) -> Sequence:
        assert self.go_on.wait(60)
        return prompt()


class Bench:
    """A prefill stage; ``peers`` answer for the decode instance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.peers = Peers(reserve=RESERVED)
        self.engine, self.prompts = Engine(), Prompts()
        self.transport = EmbeddedTransport(path="shm")
        self.store = EmbeddedFeatureStore(self.transport, 4096)
        self.clean_ups, telemetry = CleanUps(), InstanceTelemetry("p0")
        engine: Any = self.engine
        family: Any = SimpleNamespace(num_tokens=lambda item: 1)
        self.features = FeatureReceiver(
            store=self.store,
            engine=engine,
            metrics=telemetry.metrics,
            form=FeatureForm(dtype="float32", width=1, family=family),
            capacity_bytes=4096,
            clock=lambda: self.now,
        )
        self.stage = prefill_service(
            self.peers,
            engine=self.engine,
            prompts=self.prompts,
            receiver=self.features,
            clean_ups=self.clean_ups,
            telemetry=telemetry,
            lease_s=LEASE_S,
        )

    async def begin(self, items: list[wire.MediaRef] | None = None) -> asyncio.Task[Any]:
        """A prompt that the engine has, or that waits for its tokenizer."""
        request = msgspec.structs.replace(completion("r", stream=True), items=items or [], decode_url="http://d")
        working = asyncio.create_task(self.stage.prefill(request))
        await (self.engine.busy.wait() if self.prompts.go_on.is_set() else asyncio.sleep(0.05))
        return working

    async def hand_over(self) -> None:
        delivery = KVDelivery(self.stage, prompt(), "http://d")
        try:
            await delivery.open()
            await delivery.hand_over(handoff())
        finally:
            delivery.give_up("")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.prompts.go_on.set()
    await bench.clean_ups.finish()
    bench.transport.close()


async def test_a_lease_that_is_not_renewed_fails_the_request(bench: Bench) -> None:
    working = await bench.begin()
    bench.peers.answers["/kv/renew"] = Unavailable("the transfer has ended")
    with pytest.raises(InstanceFailed):
        await asyncio.wait_for(working, 300)
    await bench.clean_ups.finish()
    assert bench.peers.calls[-1] == "/kv/cancel"


async def test_a_transfer_that_was_stopped_is_not_completed(bench: Bench) -> None:
    """Whatever made the renewal fail: D may still take a hand-over, and some of the KV was not read."""
    working = await bench.begin()
    sequence, transfer = bench.engine.submitted[0]
    bench.engine.outbox.receivers["r"].feed(PromptEvent(sequence, [(SampledToken(5), None)]))
    reply = await working
    bench.peers.answers["/kv/renew"] = ServeError("out of memory")
    await until(lambda: transfer.cancelled)  # by the renewal
    with pytest.raises(BrokenStream):
        _ = [piece async for piece in reply.stream]
    await bench.clean_ups.finish()
    assert "/kv/complete" not in bench.peers.calls and "/kv/cancel" in bench.peers.calls


async def test_features_that_come_before_a_slow_tokenizer_is_done_are_kept(bench: Bench) -> None:
    bench.prompts.go_on.clear()
    items = [wire.MediaRef("a", 1, 1), wire.MediaRef("b", 1, 1)]
    working = await bench.begin(items)
    for item in items:
        feature = await bench.store.put(item.mm_hash, memoryview(bytes(4)), [1, 1], "float32", "r")
        assert feature is not None
        await bench.features.receive(bench.store.event(item.mm_hash, feature, "r"))
        bench.now += 2 * ORPHAN_S
        bench.features.expire()
    assert bench.features.num_owners == 1
    assert all(bench.features.has(item.mm_hash) for item in items)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert bench.features.num_owners == 0


async def test_a_prompt_that_is_sent_twice_is_computed_once(bench: Bench) -> None:
    working = await bench.begin()
    with pytest.raises(InvalidRequest):
        await (await bench.begin())
    assert len(bench.engine.submitted) == 1
    assert not working.done(), "the first goes on"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize(("code", "kind"), [(PEER_UNREACHABLE, PeerGone), (None, TransferError)])
async def test_an_announcement_that_fails_says_whether_the_other_can_be_reached(
    bench: Bench, code: str | None, kind: type[TransferError]
) -> None:
    bench.peers.answers["/kv/announce"] = InstanceFailed("no", code=code)
    delivery = KVDelivery(bench.stage, prompt(), "http://d")
    await delivery.open()
    announcement = wire.KVAnnouncement(REGION, 0, 1, [wire.SentKV("t", [2], [(52, 1)])])
    with pytest.raises(TransferError) as failed:
        await asyncio.to_thread(delivery.announce, announcement)
    assert type(failed.value) is kind
    delivery.give_up("")


async def test_a_reader_that_leaves_its_role_is_told_from_the_prefill_instance(bench: Bench) -> None:
    bench.peers.answers["/kv/reserve"] = Refusals("d0").error()
    with pytest.raises(InstanceFailed) as refused:
        await bench.hand_over()
    assert refused.value.code == DECODE_DRAINING


async def test_a_reader_that_waits_for_blocks_is_waited_for_and_one_that_is_gone_is_not(bench: Bench) -> None:
    async def for_ever() -> bytes:
        await asyncio.Event().wait()
        return b""

    bench.peers.answers |= {
        "/kv/reserve": for_ever,
        "/kv/renew": Unavailable("nothing to renew, but it answers"),
    }
    working = asyncio.create_task(bench.hand_over())
    await asyncio.sleep(3 * LEASE_S)
    assert not working.done()
    bench.peers.answers["/kv/renew"] = InstanceFailed("no answer")
    with pytest.raises(InstanceFailed) as failed:
        await asyncio.wait_for(working, 300)
    assert failed.value.code == PEER_UNREACHABLE


async def test_a_hand_over_leaves_nothing_to_the_garbage_collector(bench: Bench) -> None:
    """A sequence has the positions and features of its pictures."""
    with garbage() as left:
        await bench.hand_over()
        await bench.clean_ups.finish()
        await asyncio.sleep(0.01)
    assert not left & {"KVDelivery", "Sequence"}
