"""The decode side of the hand-off: the queue for blocks moves on, and blocks are given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from hand_off import REGION, Memory, TenBlocks, decode_service, handoff, reserve

from epd_serve.errors import NO_ROOM, REQUEST_ENDED, InstanceFailed, InvalidRequest, Unavailable
from epd_serve.instance.decode import Decoder
from epd_serve.protocol import wire
from epd_serve.transfer.transport import Piece, StillCopying, TransferError

LEASE_S = 0.3


def ref(name: str = "r", reason: str = "") -> wire.TransferRef:
    return wire.TransferRef(f"transfer {name}", name, reason=reason)


async def cancelled_by_the_gateway(decode: Decoder, name: str) -> None:
    expecting = asyncio.create_task(decode.decode(wire.DecodeRequest(name, stream=True)))
    await asyncio.sleep(0)
    expecting.cancel()
    await asyncio.gather(expecting, return_exceptions=True)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_request_that_finds_no_room_ends_and_the_next_gets_its_turn(is_cancelled: bool) -> None:
    engine = TenBlocks()
    decode = decode_service(engine, queue_timeout_s=60 if is_cancelled else 0.2)
    await decode.reserve(reserve("first", 24))
    large = asyncio.create_task(decode.reserve(reserve("large", 32)))
    await asyncio.sleep(0.1)  # what comes now may wait longer
    small = asyncio.create_task(decode.reserve(reserve("small", 4)))
    if is_cancelled:
        await asyncio.sleep(0.01)
        assert not small.done(), "first come, first served"
        await cancelled_by_the_gateway(decode, "large")
    with pytest.raises(Unavailable) as refusal:
        await asyncio.wait_for(large, 300)
    assert (refusal.value.code == NO_ROOM) != is_cancelled
    assert len((await asyncio.wait_for(small, 300)).block_ids) == 1
    assert (decode.num_reservations, engine.load().num_refused) == (2, 0)
    for name in ("first", "small", "large"):
        decode.cancel(ref(name))
    decode.check_integrity()
    assert engine.pool.num_free == engine.pool.capacity


async def test_the_most_urgent_reservation_is_served_first_and_of_equals_the_oldest() -> None:
    decode = decode_service(TenBlocks())
    for number in range(5):  # two blocks each
        await decode.reserve(reserve(f"{number}", 4))
    waiting = {
        name: asyncio.create_task(
            decode.reserve(msgspec.structs.replace(reserve(name, 4), priority=priority, num_sequences=number))
        )
        for name, priority, number in (("wide", 1, 3), ("late", 1, 1), ("urgent", 0, 1))
    }
    for number, served in enumerate(("urgent", None, "wide", "late")):  # the wide one takes four blocks
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting.values())
        decode.cancel(ref(f"{number}"))
        if served is not None:
            await asyncio.wait_for(waiting.pop(served), 60)


async def test_a_reservation_and_a_hand_over_told_twice_happen_once() -> None:
    engine = TenBlocks()
    decode = decode_service(engine)
    first = await decode.reserve(reserve("a", 24))
    assert await decode.reserve(reserve("a", 24)) == first
    waiting = asyncio.create_task(decode.reserve(reserve("b", 24)))
    await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequest):
        await decode.reserve(reserve("b", 24))
    decode.cancel(ref("a"))
    await asyncio.wait_for(waiting, 300)
    for _ in range(2):
        await decode.complete(handoff("b", 24))
    assert len(engine.resumed) == 1
    decode.cancel(ref("b"))  # too late: the request owns the blocks
    for too_late in (decode.reserve(reserve("b", 24)), decode.complete(handoff("a", 24))):
        with pytest.raises(Unavailable):
            await too_late
    with pytest.raises(Unavailable):
        decode.renew(ref("b"))
    assert engine.pool.num_free == engine.pool.capacity - 7


@pytest.mark.parametrize("granted", [True, False])
async def test_a_cancellation_told_twice_or_too_early_holds(granted: bool) -> None:
    engine = TenBlocks()
    decode = decode_service(engine)
    if granted:
        await decode.reserve(reserve())
    for _ in range(2):
        decode.cancel(ref(reason="the prefill instance failed"))
        decode.check_integrity()
    assert engine.pool.num_free == engine.pool.capacity
    with pytest.raises(Unavailable) as refused:
        await decode.reserve(reserve())
    assert refused.value.code == REQUEST_ENDED
    with pytest.raises(Unavailable):
        await decode.complete(handoff())
    assert not engine.resumed and engine.pool.num_free == engine.pool.capacity


async def test_a_request_expected_twice_is_answered_once_and_one_that_has_ended_is_not_waited_for() -> None:
    decode = decode_service(TenBlocks())
    expecting = asyncio.create_task(decode.decode(wire.DecodeRequest("r", stream=True)))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest):
        await decode.decode(wire.DecodeRequest("r", stream=True))
    assert not expecting.done()
    decode.cancel(ref(reason="the prefill instance failed"))
    with pytest.raises(InstanceFailed, match="the prefill instance failed"):
        await expecting
    with pytest.raises(Unavailable):
        await asyncio.wait_for(decode.decode(wire.DecodeRequest("r", stream=True)), 300)


def announcement(blocks: list[int], name: str = "r") -> wire.KVAnnouncement:
    spans = [(50 + block, 1) for block in blocks]
    return wire.KVAnnouncement(REGION, 0, 1, [wire.SentKV(f"transfer {name}", blocks, spans)])


class Transport:
    """Reads when it is let to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.error: TransferError | None = None
        self.read_from: list[int] = []
        self.num_reads = 0

    def read(self, region: wire.Region, pieces: Sequence[Piece]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        self.num_reads += 1
        for offset, piece in pieces:
            self.read_from.append(offset)
            piece[:] = bytes([offset])


class Bench:
    def __init__(self) -> None:
        self.engine, self.memory, self.transport = TenBlocks(), Memory(), Transport()
        self.decode = decode_service(self.engine, memory=self.memory, transport=self.transport)

    @property
    def num_free(self) -> int:
        self.engine.pool.check_integrity()
        self.decode.check_integrity()
        return self.engine.pool.num_free

    async def begin(self) -> asyncio.Task[wire.KVTaken]:
        """D is in the middle of reading the blocks that it lacks."""
        reply = await self.decode.reserve(reserve(hashes=[b"0", b"1"], lease_s=LEASE_S))
        task = asyncio.create_task(self.decode.read_kv(announcement(reply.block_ids[reply.num_cached_blocks :])))
        assert await asyncio.to_thread(self.transport.begun.wait, 300)
        return task

    async def until_free(self) -> None:
        async with asyncio.timeout(300):
            while self.num_free < 10:
                self.decode.expire()
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.transport.go_on.set()


async def test_what_was_read_is_decoded(bench: Bench) -> None:
    earlier = bench.engine.pool.allocate_request(8, 0)
    bench.engine.pool.register(earlier.root[0], b"0")
    task = await bench.begin()
    bench.transport.go_on.set()
    assert (await task).transfer_ids == ["transfer r"]
    await bench.decode.complete(handoff())
    (blocks,) = bench.engine.resumed
    assert bench.memory.landed == blocks.root[1:3], "block 0 was cached here"
    assert bench.transport.read_from == [50 + block for block in blocks.root[1:3]]
    assert bench.decode.num_reservations == 0
    assert not (await bench.decode.read_kv(announcement(blocks.root[1:3]))).transfer_ids, "too late"


async def test_an_announcement_is_one_read_of_what_is_still_wanted(bench: Bench) -> None:
    bench.transport.go_on.set()
    replies = [await bench.decode.reserve(reserve(name)) for name in ("t", "u")]
    (one,) = announcement(replies[0].block_ids, "t").parts
    (two,) = announcement(replies[1].block_ids, "u").parts
    given_up = announcement([9], "v").parts
    taken = await bench.decode.read_kv(wire.KVAnnouncement(REGION, 0, 1, [one, *given_up, two]))
    assert taken.transfer_ids == ["transfer t", "transfer u"]
    assert bench.transport.num_reads == 1
    assert all(bench.memory.buffer[block] == 50 + block for block in (*one.block_ids, *two.block_ids))
    taken = await bench.decode.read_kv(wire.KVAnnouncement(REGION, 0, 0, []))
    assert not taken.transfer_ids and bench.transport.num_reads == 2, "a first contact reads nothing"


@pytest.mark.parametrize("end", ["P hangs up", "the client leaves", "the lease ends"])
async def test_blocks_are_kept_while_they_are_read_into(bench: Bench, end: str) -> None:
    task = await bench.begin()
    if end == "P hangs up":
        task.cancel()
    elif end == "the client leaves":
        await cancelled_by_the_gateway(bench.decode, "r")
    with pytest.raises(Unavailable):
        await bench.decode.complete(handoff())
    await asyncio.sleep(2 * LEASE_S)
    bench.decode.expire()
    assert bench.num_free == 7
    bench.transport.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    await bench.until_free()
    assert not bench.engine.resumed


@pytest.mark.parametrize("error", [TransferError("timed out"), StillCopying("not done in time")])
async def test_blocks_of_a_read_that_failed_go_back(bench: Bench, error: TransferError) -> None:
    """At once where P gives up; where bytes may still arrive, since the engine copies on, after a lease."""
    task = await bench.begin()
    bench.transport.error = error
    bench.transport.go_on.set()
    with pytest.raises(InstanceFailed):
        await task
    assert not bench.memory.landed and bench.num_free == 7
    bench.decode.cancel(ref(reason="it failed"))
    bench.decode.expire()
    assert bench.num_free == (7 if isinstance(error, StillCopying) else 10)
    await bench.until_free()
