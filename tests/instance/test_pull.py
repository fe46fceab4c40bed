"""KV that the decode instance reads: blocks go back exactly when nothing can be written to them any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import DECODE_DRAINING, InstanceFailed, InvalidRequest, ServeError, Unavailable
from epd_serve.instance.decode import DecodeService
from epd_serve.instance.kv_delivery import PullDelivery, confirm_pulled
from epd_serve.instance.lifecycle import left
from epd_serve.protocol import wire
from epd_serve.sequence import Sequence as Prompt
from epd_serve.telemetry.timeline import Timeline
from epd_serve.transfer.transport import Piece, TransferError, WriteGate
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


def request(num_tokens: int = 9, lease_s: float = LEASE_S) -> wire.PullRequest:
    return wire.PullRequest(
        handoff=handoff(num_tokens),
        source_url="http://p",
        region=REGION,
        num_blocks=100,
        block_ids=list(range(50, 50 + -(-num_tokens // 4))),
        block_hashes=[b"0", b"1"],
        num_sequences=1,
        layout=LAYOUT,
        lease_s=lease_s,
    )


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
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, asker: Any
    ) -> RequestBlocks | None:
        request = (num_prompt_tokens, 0, num_sequences, hashes)
        return (
            self.pool.allocate_request(*request) if self.pool.num_missing(*request) <= self.pool.num_free else None
        )

    lacks_blocks = True

    def in_turn(self, reservations: list[Any]) -> list[Any]:
        return [one for _, one in reservations]

    def stop_reserving(self) -> None: ...

    def unreserve(self, blocks: RequestBlocks) -> None:
        self.pool.release(blocks.all())


class Memory:
    region = REGION
    num_blocks = 11

    def __init__(self) -> None:
        self.landed: list[int] = []

    def land(self, blocks: list[int]) -> None:
        self.landed += blocks

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        assert remote_num_blocks == 100
        return [(there, memoryview(bytearray([here]))) for here, there in zip(local, remote, strict=True)]

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks

    def stage(self, layers: range, blocks: Sequence[int]) -> None: ...


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

    gate = WriteGate()

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.error: TransferError | None = None
        self.read_from: list[int] = []

    def read(self, region: wire.Region, pieces: Sequence[Piece]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        self.read_from += [offset for offset, _ in pieces]


class Peers:
    """Another instance that answers as it is told."""

    def __init__(self, answer: ServeError | Callable[[], Awaitable[bytes]] | None = None) -> None:
        self.answers: dict[str, ServeError | Callable[[], Awaitable[bytes]] | None] = {"/kv/pulled": answer}
        self.calls: list[str] = []

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        self.calls.append(path)
        answer = self.answers.get(path)
        if isinstance(answer, ServeError):
            raise answer
        return b"" if answer is None else await answer()


class Bench:
    def __init__(self) -> None:
        self.engine, self.memory, self.transport, self.peers = Engine(), Memory(), Transport(), Peers()
        parts: list[Any] = [self.engine, self.memory, Vocabulary(), LAYOUT]
        others: dict[str, Any] = {"transport": self.transport, "peers": self.peers, "compile": None}
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

    async def begin(self, lease_s: float = LEASE_S) -> asyncio.Task[None]:
        task = asyncio.create_task(self.decode.pull(request(lease_s=lease_s)))
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


async def test_what_was_read_and_confirmed_is_decoded(bench: Bench) -> None:
    earlier = bench.engine.pool.allocate_request(8, 0)
    bench.engine.pool.register(earlier.root[0], b"0")
    task = await bench.begin()
    with pytest.raises(InvalidRequest, match="being read already"):
        await bench.decode.pull(request())
    assert not bench.peers.calls
    bench.transport.go_on.set()
    await task
    assert bench.transport.read_from == [51, 52], "block 0 was cached here"
    assert bench.peers.calls == ["/kv/pulled"]
    (blocks,) = bench.engine.resumed
    assert bench.memory.landed == blocks.root[1:3]
    assert bench.decode.num_reservations == 0
    await bench.decode.pull(request())  # a repetition changes nothing
    assert len(bench.engine.resumed) == 1


async def test_what_was_free_again_before_it_was_read_is_thrown_away(bench: Bench) -> None:
    bench.peers.answers["/kv/pulled"] = Unavailable("transfer t has ended")
    task = await bench.begin()
    bench.transport.go_on.set()
    with pytest.raises(Unavailable):
        await task
    assert await bench.free_within(300)
    assert not bench.engine.resumed


@pytest.mark.parametrize("end", ["P hangs up", "P cancels", "the client leaves"])
async def test_blocks_are_kept_while_they_are_written(bench: Bench, end: str) -> None:
    task = await bench.begin()
    if end == "P hangs up":
        task.cancel()
    elif end == "P cancels":
        bench.decode.cancel(wire.TransferRef("t", "r", reason="it failed"))
    else:
        bench.decode._end("r")
    await asyncio.sleep(2 * LEASE_S)
    bench.decode.expire()
    assert bench.num_free == 7
    bench.transport.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    if end == "P cancels":
        assert task.done()
    else:
        assert await bench.free_within(300)
        assert not bench.engine.resumed


async def test_a_read_that_failed_may_still_arrive_until_the_lease_ends(bench: Bench) -> None:
    task = await bench.begin(lease_s=60)
    bench.transport.error = TransferError("timed out")
    bench.transport.go_on.set()
    with pytest.raises(InstanceFailed, match="timed out"):
        await task
    bench.decode.expire()
    assert bench.num_free == 7
    bench.decode._reservations.expire(time.monotonic() + 60)
    assert bench.num_free == 10


# ---------------------------------------------------------------------- the prefill side


def delivery(peers: Any, pulls: set[str]) -> PullDelivery:
    sequence = Prompt(
        request_id="r",
        prompt_ids=[1] * 9,
        sampling=SamplingParams(seed=0),
        max_tokens=3,
        positions=None,
        blocks=[5, 6, 7],
    )
    reserve = wire.ReserveRequest(
        transfer_id="t",
        request_id="r",
        num_prompt_tokens=9,
        max_tokens=3,
        num_sequences=1,
        block_hashes=[],
        layout=LAYOUT,
        lease_s=LEASE_S,
    )
    memory: Any = Memory()
    return PullDelivery(reserve, "http://d", sequence, memory, peers, pulls, source_url="http://p")


async def test_a_confirmation_counts_only_while_the_blocks_are_held() -> None:
    ref, pulls, confirmed = wire.TransferRef("t", "r"), set[str](), []

    async def pulled() -> bytes:
        confirm_pulled(pulls, ref)
        confirmed.append(True)
        with pytest.raises(Unavailable):
            confirm_pulled(pulls, ref)
        return b""

    peers = Peers()
    peers.answers["/kv/pull"] = pulled
    await delivery(peers, pulls).hand_over(handoff())
    assert confirmed == [True]

    async def late() -> bytes:
        working.stop()
        confirm_pulled(pulls, ref)
        return b""

    peers.answers["/kv/pull"] = late
    working = delivery(peers, pulls)
    with pytest.raises(Unavailable):
        await working.hand_over(handoff())


async def test_a_reader_that_leaves_its_role_is_told_from_the_prefill_instance() -> None:
    peers = Peers()
    peers.answers["/kv/pull"] = left("d0")
    with pytest.raises(InstanceFailed, match="d0 is leaving its role") as refused:
        await delivery(peers, set()).hand_over(handoff())
    assert refused.value.code == DECODE_DRAINING


async def test_a_client_that_leaves_during_the_staging_frees_no_block_before_it_is_over() -> None:
    """Else the thread writes into the staged bytes of a request that has the blocks by then."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Memory):
        def stage(self, layers: range, blocks: Sequence[int]) -> None:
            begun.set()
            assert go_on.wait(300)

    memory: Any = Slow()
    working = delivery(Peers(), set())
    working._memory = memory
    task = asyncio.create_task(working.hand_over(handoff()))
    await asyncio.to_thread(begun.wait, 300)
    task.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)


async def test_a_reader_that_waits_for_blocks_is_waited_for_and_one_that_is_gone_is_not() -> None:
    async def for_ever() -> bytes:
        await asyncio.sleep(60)
        return b""

    peers, pulls = Peers(), set[str]()
    peers.answers |= {"/kv/pull": for_ever, "/kv/renew": Unavailable("nothing to renew, but it answers")}
    working = asyncio.create_task(delivery(peers, pulls).hand_over(handoff()))
    await asyncio.sleep(3 * LEASE_S)
    assert not working.done()
    peers.answers["/kv/renew"] = InstanceFailed("no answer")
    with pytest.raises(InstanceFailed, match="answers no more"):
        await asyncio.wait_for(working, 300)
    with pytest.raises(Unavailable):
        confirm_pulled(pulls, wire.TransferRef("t", "r"))
