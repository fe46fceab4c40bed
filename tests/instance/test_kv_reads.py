"""KV that the decode instance reads: blocks go back exactly when nothing is read into them any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import DECODE_DRAINING, PEER_UNREACHABLE, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.calls import left
from epd_serve.instance.decode import DecodeService
from epd_serve.instance.kv_delivery import KVDelivery
from epd_serve.protocol import wire
from epd_serve.sched.sequence import Sequence as Prompt
from epd_serve.telemetry.span import Timeline
from epd_serve.transfer.kv_sender import DecodePeer, OutgoingTransfer
from epd_serve.transfer.transport import PeerGone, Piece, StillCopying, TransferError
from epd_serve.types import SamplingParams

LAYOUT = wire.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")
REGION = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)
LEASE_S = 0.3


def handoff(num_tokens: int = 9) -> wire.Handoff:
    return wire.Handoff(
        transfer_id="t",
        request_id="r",
        prompt_ids=[1] * num_tokens,
        position_delta=0,
        sampling=SamplingParams(seed=0),
        max_tokens=3,
        output=wire.OutputOptions(kind="chat", id="r", created=0, model="m"),
        first=[wire.FirstToken(token_id=1)],
    )


def reserve(name: str = "t") -> wire.ReserveRequest:
    return wire.ReserveRequest(
        transfer_id=name,
        request_id="r",
        num_prompt_tokens=9,
        max_tokens=3,
        num_sequences=1,
        block_hashes=[b"0", b"1"],
        layout=LAYOUT,
        lease_s=LEASE_S,
        region=REGION,
    )


def announcement(blocks: list[int], name: str = "t") -> wire.KVAnnouncement:
    spans = [(50 + block, 1) for block in blocks]
    return wire.KVAnnouncement(REGION, 0, 1, [wire.SentKV(name, blocks, spans)])


class Engine:
    """Ten blocks and no model."""

    def __init__(self) -> None:
        self.pool = BlockPool(11, 4)
        self.resumed: list[RequestBlocks] = []

    def check_fits(self, *arguments: int) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def resume(self, sequence: Prompt, blocks: RequestBlocks, tokens: Any) -> None:
        self.resumed.append(blocks)

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, priority: int
    ) -> RequestBlocks | None:
        request = (num_prompt_tokens, 0, num_sequences, hashes)
        return (
            self.pool.allocate_request(*request) if self.pool.num_missing(*request) <= self.pool.num_free else None
        )

    def stop_reserving(self) -> None: ...

    def unreserve(self, blocks: RequestBlocks) -> None:
        self.pool.release(blocks.all())


@dataclass
class Landing:
    blocks: Sequence[int]

    def spans(self, first: int, count: int) -> list[tuple[int, int]]:
        return [(block, 1) for block in self.blocks[first : first + count]]


class Memory:
    layout = LAYOUT
    region = REGION
    num_blocks = 11
    staged_cells = None
    buffer = memoryview(bytearray(11))

    def __init__(self) -> None:
        self.landed: list[int] = []

    @contextmanager
    def land(self, layers: range, blocks: Sequence[int]) -> Iterator[Landing]:
        assert threading.current_thread() is not threading.main_thread(), "never on the event loop"
        yield Landing(blocks)
        self.landed += blocks

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks


class Vocabulary:
    special_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        return b"x"

    def text_of(self, token_id: int) -> str | None:
        return "x"


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


class Peers:
    """Another instance that answers as it is told."""

    def __init__(self) -> None:
        self.answers: dict[str, ServeError | Callable[[], Awaitable[bytes]]] = {}
        self.calls: list[str] = []

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        self.calls.append(path)
        answer = self.answers.get(path)
        if isinstance(answer, ServeError):
            raise answer
        return b"" if answer is None else await answer()


class Bench:
    def __init__(self) -> None:
        self.engine, self.memory, self.transport = Engine(), Memory(), Transport()
        parts: list[Any] = [self.engine, self.memory, Vocabulary(), LAYOUT]
        others: dict[str, Any] = {"transport": self.transport, "compile": None}
        self.decode = DecodeService(
            *parts,
            **others,
            orphan_s=10,
            queue_timeout_s=60,
            listen=lambda request_id, feed: None,
            on_read=lambda nbytes, seconds: None,
            timeline=Timeline(time.monotonic, lambda span: None),
        )

    @property
    def num_free(self) -> int:
        self.engine.pool.check_integrity()
        self.decode.check_integrity()
        return self.engine.pool.num_free

    async def begin(self) -> asyncio.Task[wire.KVTaken]:
        """D is in the middle of reading the blocks that it lacks."""
        reply = await self.decode.reserve(reserve())
        task = asyncio.create_task(self.decode.read_kv(announcement(reply.block_ids[reply.num_cached_blocks :])))
        assert await asyncio.to_thread(self.transport.begun.wait, 300)
        return task

    async def free_within(self, seconds: float) -> bool:
        for _ in range(int(seconds / 0.02)):
            self.decode.expire()
            if self.num_free == 10:
                return True
            await asyncio.sleep(0.02)
        return False


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.transport.go_on.set()


async def test_what_was_read_is_decoded(bench: Bench) -> None:
    earlier = bench.engine.pool.allocate_request(8, 0)
    bench.engine.pool.register(earlier.root[0], b"0")
    task = await bench.begin()
    bench.transport.go_on.set()
    assert (await task).transfer_ids == ["t"]
    await bench.decode.complete(handoff())
    (blocks,) = bench.engine.resumed
    assert bench.memory.landed == blocks.root[1:3], "block 0 was cached here"
    assert bench.transport.read_from == [50 + block for block in blocks.root[1:3]]
    assert bench.decode.num_reservations == 0
    assert not (await bench.decode.read_kv(announcement(blocks.root[1:3]))).transfer_ids, "too late"


async def test_all_of_an_announcement_is_one_read(bench: Bench) -> None:
    bench.transport.go_on.set()
    replies = [await bench.decode.reserve(reserve(name)) for name in ("t", "u")]
    (one,) = announcement(replies[0].block_ids, "t").parts
    (two,) = announcement(replies[1].block_ids, "u").parts
    given_up = announcement([9], "v").parts
    taken = await bench.decode.read_kv(wire.KVAnnouncement(REGION, 0, 1, [one, *given_up, two]))
    assert taken.transfer_ids == ["t", "u"]
    assert bench.transport.num_reads == 1
    assert all(bench.memory.buffer[block] == 50 + block for block in (*one.block_ids, *two.block_ids))


async def test_nothing_is_read_into_blocks_of_others(bench: Bench) -> None:
    bench.transport.go_on.set()
    reply = await bench.decode.reserve(reserve())
    assert not (await bench.decode.read_kv(announcement([*reply.block_ids, 9]))).transfer_ids
    assert not (await bench.decode.read_kv(announcement(reply.block_ids, "another"))).transfer_ids
    assert not bench.memory.landed


@pytest.mark.parametrize("end", ["P hangs up", "P cancels", "the client leaves", "the lease ends"])
async def test_blocks_are_kept_while_they_are_read_into(bench: Bench, end: str) -> None:
    task = await bench.begin()
    if end == "P hangs up":
        task.cancel()
    elif end == "P cancels":
        bench.decode.cancel(wire.TransferRef("t", "r", reason="it failed"))
    elif end == "the client leaves":
        bench.decode._end("r")
    with pytest.raises(Unavailable):
        await bench.decode.complete(handoff())
    await asyncio.sleep(2 * LEASE_S)
    bench.decode.expire()
    assert bench.num_free == 7
    bench.transport.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert await bench.free_within(300)
    assert not bench.engine.resumed


async def test_blocks_of_a_read_that_failed_go_back_when_p_gives_up(bench: Bench) -> None:
    task = await bench.begin()
    bench.transport.error = TransferError("timed out")
    bench.transport.go_on.set()
    with pytest.raises(InstanceFailed, match="timed out"):
        await task
    assert not bench.memory.landed and bench.num_free == 7
    bench.decode.cancel(wire.TransferRef("t", "r"))
    assert bench.num_free == 10


async def test_a_first_contact_reads_nothing(bench: Bench) -> None:
    bench.transport.go_on.set()
    taken = await bench.decode.read_kv(wire.KVAnnouncement(REGION, 0, 0, []))
    assert not taken.transfer_ids and bench.transport.num_reads == 1 and not bench.memory.landed


async def test_bytes_of_a_read_that_was_given_up_may_still_arrive(bench: Bench) -> None:
    """It is this side's own: the engine copies on."""
    task = await bench.begin()
    bench.transport.error = StillCopying("not done in time")
    bench.transport.go_on.set()
    with pytest.raises(InstanceFailed, match="not done in time"):
        await task
    bench.decode.cancel(wire.TransferRef("t", "r", reason="it failed"))
    bench.decode.expire()
    assert bench.num_free == 7
    bench.decode._reservations.expire(time.monotonic() + LEASE_S)
    assert bench.num_free == 10


# ---------------------------------------------------------------------- the prefill side


class Sender:
    """Has nothing under way."""

    def connect(self, name: str, peer: DecodePeer) -> None: ...

    def fence(self, transfer: OutgoingTransfer, passed: Callable[[], None]) -> None:
        passed()


def delivery(peers: Any) -> KVDelivery:
    sequence = Prompt(
        request_id="r",
        prompt_ids=[1] * 9,
        sampling=SamplingParams(seed=0),
        max_tokens=3,
        positions=None,
        blocks=[5, 6, 7],
    )
    sender: Any = Sender()
    memory: Any = Memory()
    return KVDelivery(
        sequence,
        0,
        "http://d",
        sender,
        peers,
        memory,
        lease_s=LEASE_S,
        abort=lambda name: None,
        spawn=lambda task: None,
    )


async def handed_over(working: KVDelivery) -> None:
    try:
        await working.open(lambda event: None)
        await working.hand_over(handoff())
    finally:
        working.stop()


async def granted() -> bytes:
    return wire.encode(wire.ReserveReply(block_ids=[1, 2, 3], num_cached_blocks=1, name="d0"))


async def test_what_was_given_up_before_it_was_read_is_not_handed_over() -> None:
    peers = Peers()
    peers.answers["/kv/reserve"] = granted
    working = delivery(peers)
    working.transfer.cancelled = True  # its blocks here may be another's
    with pytest.raises(InstanceFailed, match="gave up"):
        await handed_over(working)
    assert "/kv/complete" not in peers.calls


async def test_an_announcement_that_fails_says_whether_the_other_can_be_reached() -> None:
    peers = Peers()
    peers.answers["/kv/reserve"] = granted
    working = delivery(peers)
    await working.open(lambda event: None)
    for code, kind in ((PEER_UNREACHABLE, PeerGone), (None, TransferError)):
        peers.answers["/kv/announce"] = InstanceFailed("no", code=code)
        with pytest.raises(TransferError) as failed:
            await asyncio.to_thread(working.transfer.peer.announce, announcement([2]))
        assert type(failed.value) is kind
    working.stop()


async def test_a_reader_that_leaves_its_role_is_told_from_the_prefill_instance() -> None:
    peers = Peers()
    peers.answers["/kv/reserve"] = left("d0")
    with pytest.raises(InstanceFailed, match="d0 is leaving its role") as refused:
        await handed_over(delivery(peers))
    assert refused.value.code == DECODE_DRAINING


async def test_a_reader_that_waits_for_blocks_is_waited_for_and_one_that_is_gone_is_not() -> None:
    async def for_ever() -> bytes:
        await asyncio.sleep(60)
        return b""

    peers = Peers()
    peers.answers |= {"/kv/reserve": for_ever, "/kv/renew": Unavailable("nothing to renew, but it answers")}
    working = asyncio.create_task(handed_over(delivery(peers)))
    await asyncio.sleep(3 * LEASE_S)
    assert not working.done()
    peers.answers["/kv/renew"] = InstanceFailed("no answer")
    with pytest.raises(InstanceFailed, match="answers no more"):
        await asyncio.wait_for(working, 300)
