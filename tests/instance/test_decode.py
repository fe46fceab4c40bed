"""The decode side of the hand-off: the queue for blocks moves on, and what has ended stays ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import InstanceFailed, InvalidRequest, Unavailable
from epd_serve.instance.decode import DecodeService
from epd_serve.protocol import wire
from epd_serve.telemetry.span import Timeline
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.types import SamplingParams

LAYOUT = wire.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")


class Engine:
    """Ten blocks and no model."""

    def __init__(self) -> None:
        self.pool = BlockPool(11, 4)

    def check_fits(self, *arguments: int) -> None: ...

    def abort(self, request_id: str) -> None: ...

    num_resumed = 0
    reserving = False

    def resume(self, *arguments: Any) -> None:
        self.num_resumed += 1

    def unreserve(self, blocks: RequestBlocks) -> None:
        self.pool.release(blocks.all())

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, priority: int
    ) -> RequestBlocks | None:
        request = (num_prompt_tokens, 0, num_sequences, hashes)
        self.reserving = self.pool.num_missing(*request) > self.pool.num_free
        return None if self.reserving else self.pool.allocate_request(*request)

    def stop_reserving(self) -> None:
        self.reserving = False


class Memory:
    region = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)
    num_blocks = 11
    staged_cells = None


class Vocabulary:
    special_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        return b"x"

    def text_of(self, token_id: int) -> str | None:
        return "x"


def service(engine: Engine, memory: Memory, *, queue_timeout_s: float = 60) -> DecodeService:
    parts: list[Any] = [engine, memory, Vocabulary(), LAYOUT]
    nowhere: Any = None
    return DecodeService(
        *parts,
        transport=EmbeddedTransport(path="shm"),
        queue_timeout_s=queue_timeout_s,
        orphan_s=10,
        listen=lambda request_id, feed: None,
        on_read=lambda nbytes, seconds: None,
        timeline=Timeline(time.monotonic, lambda span: None),
        compile=nowhere,
    )


def reserve(name: str, num_prompt_tokens: int, hashes: Sequence[bytes] = ()) -> wire.ReserveRequest:
    return wire.ReserveRequest(
        transfer_id=f"transfer {name}",
        request_id=name,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=0,
        num_sequences=1,
        block_hashes=list(hashes),
        layout=LAYOUT,
        lease_s=30,
        region=Memory.region,
    )


async def cancelled_by_the_gateway(decode: DecodeService, name: str) -> None:
    expecting = asyncio.create_task(decode.decode(wire.DecodeRequest(name, stream=True)))
    await asyncio.sleep(0)
    expecting.cancel()
    await asyncio.gather(expecting, return_exceptions=True)


async def test_a_cancelled_request_at_the_head_of_the_queue_holds_nobody_up() -> None:
    decode = service(Engine(), Memory())
    await decode.reserve(reserve("first", 24))
    large = asyncio.create_task(decode.reserve(reserve("large", 32)))
    small = asyncio.create_task(decode.reserve(reserve("small", 4)))
    await asyncio.sleep(0.01)
    assert not small.done(), "first come, first served"
    await cancelled_by_the_gateway(decode, "large")
    assert len((await asyncio.wait_for(small, 300)).block_ids) == 1
    with pytest.raises(Unavailable):
        await large
    decode.check_integrity()


async def test_a_request_that_has_ended_is_not_waited_for() -> None:
    decode = service(Engine(), Memory())
    await cancelled_by_the_gateway(decode, "r")
    with pytest.raises(Unavailable, match="has ended"):
        await asyncio.wait_for(decode.decode(wire.DecodeRequest("r", stream=True)), 300)


async def test_a_request_that_finds_no_room_is_refused_in_time_and_the_next_gets_its_turn() -> None:
    engine = Engine()
    decode = service(engine, Memory(), queue_timeout_s=0.2)
    await decode.reserve(reserve("first", 24))
    large = asyncio.create_task(decode.reserve(reserve("large", 32)))
    await asyncio.sleep(0)  # it has begun to wait
    decode._queue_timeout_s = 60
    small = asyncio.create_task(decode.reserve(reserve("small", 4)))
    await asyncio.sleep(0)
    assert len(decode.waiting) == 2, "what presses on decode, whatever it lacks"
    with pytest.raises(Unavailable, match="no room") as refusal:
        await asyncio.wait_for(large, 300)
    assert (refusal.value.status, refusal.value.code) == (503, "no_room")
    assert len((await asyncio.wait_for(small, 300)).block_ids) == 1
    assert (decode.num_reservations, decode.waiting) == (2, [])
    for name in ("first", "small", "large"):
        decode.cancel(wire.TransferRef(f"transfer {name}", name))
    decode.check_integrity()
    assert engine.pool.num_free == engine.pool.capacity


async def test_a_reservation_asked_for_twice_is_one_reservation() -> None:
    engine = Engine()
    decode = service(engine, Memory())
    first = await decode.reserve(reserve("a", 24))
    assert await decode.reserve(reserve("a", 24)) == first
    waiting = [asyncio.create_task(decode.reserve(reserve("b", 24))) for _ in range(3)]
    await asyncio.sleep(0.01)
    decode.cancel(wire.TransferRef("transfer a", "a"))
    decode.grant()
    replies = await asyncio.wait_for(asyncio.gather(*waiting), 300)
    assert replies[0] == replies[1] == replies[2]
    assert engine.pool.num_free == engine.pool.capacity - 6
    await decode.complete(handoff("b", 24))
    with pytest.raises(Unavailable):
        await decode.reserve(reserve("b", 24))
    assert engine.pool.num_free == engine.pool.capacity - 6, "a late repetition takes nothing"


async def test_a_hand_over_told_twice_happens_once() -> None:
    engine = Engine()
    decode = service(engine, Memory())
    await decode.reserve(reserve("r", 9))
    for _ in range(3):
        await decode.complete(handoff("r", 9))
    assert engine.num_resumed == 1
    decode.cancel(wire.TransferRef("transfer r", "r"))  # too late: the request owns the blocks
    assert engine.pool.num_free == engine.pool.capacity - 3
    with pytest.raises(Unavailable):
        decode.renew(wire.TransferRef("transfer r", "r"))


@pytest.mark.parametrize("granted", [True, False])
async def test_a_cancellation_told_twice_or_too_early_holds(granted: bool) -> None:
    engine = Engine()
    decode = service(engine, Memory())
    if granted:
        await decode.reserve(reserve("r", 9))
    for _ in range(2):
        decode.cancel(wire.TransferRef("transfer r", "r", reason="the prefill instance failed"))
        decode.check_integrity()
    assert engine.pool.num_free == engine.pool.capacity
    with pytest.raises(Unavailable, match="was cancelled"):
        await decode.reserve(reserve("r", 9))
    with pytest.raises(Unavailable, match="has ended"):
        await decode.complete(handoff("r", 9))
    assert engine.num_resumed == 0
    assert engine.pool.num_free == engine.pool.capacity


async def test_a_request_expected_twice_is_answered_once() -> None:
    decode = service(Engine(), Memory())
    expecting = asyncio.create_task(decode.decode(wire.DecodeRequest("r", stream=True)))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="being served already"):
        await decode.decode(wire.DecodeRequest("r", stream=True))
    assert not expecting.done()
    decode.cancel(wire.TransferRef("t", "r", reason="the prefill instance failed"))
    with pytest.raises(InstanceFailed, match="the prefill instance failed"):
        await expecting


def handoff(name: str, num_prompt_tokens: int) -> wire.Handoff:
    return wire.Handoff(
        transfer_id=f"transfer {name}",
        request_id=name,
        prompt_ids=[1] * num_prompt_tokens,
        position_delta=0,
        sampling=SamplingParams(seed=0),
        max_tokens=4,
        output=wire.OutputOptions(kind="chat", id=name, created=0, model="m"),
        first=[wire.FirstToken(token_id=1)],
    )


class Taken(Engine):
    """There are blocks for all, and a place for some."""

    num_places = 0

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, priority: int
    ) -> RequestBlocks | None:
        if self.num_places < num_sequences:
            return None
        self.num_places -= num_sequences
        return self.pool.allocate_request(num_prompt_tokens, 0, num_sequences, hashes)


async def test_the_most_urgent_reservation_is_served_first_and_of_equals_the_oldest() -> None:
    engine = Taken()
    decode = service(engine, Memory())
    waiting = {
        name: asyncio.create_task(
            decode.reserve(msgspec.structs.replace(reserve(name, 4), priority=priority, num_sequences=number))
        )
        for name, priority, number in (("wide", 1, 3), ("late", 1, 1), ("urgent", 0, 1))
    }
    order = []
    for num_places in (1, 3, 1):
        await asyncio.sleep(0)
        engine.num_places = num_places
        decode.grant()
        done, _ = await asyncio.wait(waiting.values(), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        [name] = [name for name, task in waiting.items() if task in done]
        order.append(name)
        await waiting.pop(name)
    assert order == ["urgent", "wide", "late"]
