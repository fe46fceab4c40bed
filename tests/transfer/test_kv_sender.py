"""The sender: whatever one transfer meets, the others go out, every fence is passed, the times add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.cpu import CpuEvent
from epd_serve.protocol.wire import KVOffer, KVTaken, Region, ReserveReply
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer, group_ends, seconds_until_sent
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part, RemoteWrite
from epd_serve.transfer.shaped import ShapedTransport
from epd_serve.transfer.shared_memory import MAPPED_SLOT, is_being_written
from epd_serve.transfer.transport import Piece, Slab, TransferError


@dataclass
class Staged:
    """One byte per block and layer, which is the number of the block."""

    layers: range
    blocks: Sequence[int]

    def spans(self, first: int, count: int) -> list[tuple[int, int]]:
        return [(layer * 100 + block, 1) for layer in self.layers for block in self.blocks[first : first + count]]

    def pieces(self, first: int, remote: Sequence[int], remote_num_blocks: int) -> list[Piece]:
        local = self.blocks[first : first + len(remote)]
        return [
            (layer * remote_num_blocks + there, memoryview(bytes([here])))
            for layer in self.layers
            for here, there in zip(local, remote, strict=True)
        ]


class Source:
    """Block 13 cannot be read, as on an accelerator whose copy fails."""

    region = Region(name="kv", nbytes=1000, host_id="h", pid=1, fd=1, host="", port=0)
    buffer = memoryview(b"")

    def __init__(self, staged_cells: int | None = None) -> None:
        self.staged_cells = staged_cells
        self.most_staged = 0

    @contextmanager
    def stage(self, layers: range, blocks: Sequence[int]) -> Iterator[Staged]:
        self.most_staged = max(self.most_staged, len(layers) * len(blocks))
        if 13 in blocks:
            raise RuntimeError("out of memory")
        yield Staged(layers, blocks)

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks


class Counting:
    """Counts the writes to each region; those to a stalled one take as long as ``stall`` says."""

    def __init__(self) -> None:
        self.inner = EmbeddedTransport(path="shm")
        self.gate = self.inner.gate
        self.writes: list[tuple[str, int]] = []
        self.stalled: dict[str, threading.Event] = {}

    def allocate(self, name: str, nbytes: int) -> Slab:
        return self.inner.allocate(name, nbytes)

    def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
        if region.name in self.stalled:
            self.stalled[region.name].wait(300)
        self.inner.write(region, pieces, transfer_ids)
        self.writes.append((region.name, len(pieces)))

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        self.inner.read(region, pieces)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def transport() -> Iterator[Counting]:
    transport = Counting()
    yield transport
    transport.close()


def target(slab: Slab) -> ReserveReply:
    return ReserveReply(block_ids=[2], num_cached_blocks=0, region=slab.region, num_blocks=8)


def outgoing(name: str, slab: Slab, lifetime_s: float = 60.0) -> OutgoingTransfer:
    return OutgoingTransfer(name, target(slab), time.monotonic() + lifetime_s)


def passed(sender: KVSender, transfer: OutgoingTransfer) -> bool:
    event = threading.Event()
    sender.fence(transfer, event.set)
    return event.wait(60)


class Computing(CpuEvent):
    """Work of a device that ``end`` ends."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self.end = self._ended.set

    def query(self) -> bool:
        return self._ended.is_set()

    def synchronize(self) -> None:
        assert self._ended.wait(60)


def test_a_step_that_failed_on_the_device_fails_its_transfers(transport: Counting) -> None:
    """Else the decode instance would be told that all of the KV is there."""
    slab = transport.allocate("kv", 8)
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    transfer = outgoing("t", slab)

    class Failing(CpuEvent):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    sender.push(range(1), [Part(transfer, [7], [3])], Failing())
    sender.push(range(1), [Part(transfer, [8], [4])])
    assert passed(sender, transfer)
    assert "illegal memory access" in str(transfer.error)
    assert bytes(slab.buffer) == bytes(8)
    sender.close()


@pytest.mark.parametrize(
    ("blocks", "lifetime_s", "message"), [([13], 60.0, "out of memory"), ([7], -1.0, "lease of transfer")]
)
def test_a_transfer_that_fails_takes_no_other_along(
    transport: Counting, blocks: list[int], lifetime_s: float, message: str
) -> None:
    slab = transport.allocate("kv", 8)
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    failing, fine = outgoing("failing", slab, lifetime_s), outgoing("fine", slab)
    sender.push(range(1), [Part(failing, blocks, [3])])
    sender.push(range(1), [Part(failing, [8], [4])])
    sender.push(range(1), [Part(fine, [9], [2])])
    assert passed(sender, failing)
    assert passed(sender, fine)
    assert message in str(failing.error)
    assert fine.error is None
    assert bytes(slab.buffer) == bytes([0, 0, 9, 0, 0, 0, 0, 0]), "a failed transfer writes nothing more"
    sender.close()


def test_a_step_is_one_write_without_those_that_may_not_write(transport: Counting) -> None:
    slab = transport.allocate("kv", 16)
    sender = KVSender(transport, Source(), GroupSizer(num_layers=2), time.monotonic)
    one, two, gone, late = (outgoing(name, slab) for name in ("one", "two", "gone", "late"))
    gone.cancelled = True
    late.deadline = 0.0
    parts = [Part(one, [5, 6], [1, 2]), Part(gone, [7], [3]), Part(two, [8], [4]), Part(late, [9], [5])]
    sender.push(range(2), parts)
    assert passed(sender, two)
    assert transport.writes == [(slab.region.name, 6)]
    assert bytes(slab.buffer) == bytes([0, 5, 6, 0, 8, 0, 0, 0]) * 2
    assert (one.num_bytes, two.num_bytes, gone.num_bytes) == (4, 2, 0)
    assert one.transfer_s == pytest.approx(2 * two.transfer_s)
    assert late.error is not None
    assert gone.error is None
    sender.close()


def test_what_is_larger_than_the_staging_memory_of_either_side_goes_in_rounds(transport: Counting) -> None:
    slab = transport.allocate("kv", 80)
    source, offers = Source(staged_cells=4), list[KVOffer]()

    def offer(one: KVOffer) -> KVTaken:
        offers.append(one)
        return KVTaken([part.transfer_id for part in one.parts if part.transfer_id != "given up"])

    sender = KVSender(transport, source, GroupSizer(num_layers=3), time.monotonic)
    one, two, gone = (outgoing(name, slab) for name in ("one", "two", "given up"))
    for transfer in (one, two, gone):
        transfer.target = msgspec.structs.replace(target(slab), staged_cells=3)
        transfer.offer = offer
    parts = [Part(one, [5, 6], [1, 2]), Part(gone, [8], [4]), Part(two, [9, 7], [3, 6])]
    sender.push(range(3), parts)
    assert passed(sender, two)
    assert transport.writes == [], "nobody writes there"
    assert source.most_staged <= 3
    found = [
        (
            part.transfer_id,
            message.first_layer + i // len(part.block_ids),
            part.block_ids[i % len(part.block_ids)],
            at,
        )
        for message in offers
        for part in message.parts
        for i, (at, _) in enumerate(part.spans)
    ]
    places = {("one", 1): 5, ("one", 2): 6, ("two", 3): 9, ("two", 6): 7}
    due = [(name, layer, to, 100 * layer + of) for layer in range(3) for (name, to), of in places.items()]
    assert sorted(one for one in found if one[0] != "given up") == sorted(due)
    assert [one for one in found if one[0] == "given up"] == [("given up", 0, 4, 8)], "it is not offered again"
    assert gone.cancelled and not one.cancelled
    assert (one.num_bytes, two.num_bytes, gone.num_bytes) == (6, 6, 0)
    sender.close()


def test_a_stalled_decode_instance_holds_up_no_other(transport: Counting) -> None:
    stalled, fine = transport.allocate("kv", 8), transport.allocate("kv", 8)
    transport.stalled[stalled.region.name] = threading.Event()
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    slow, quick = outgoing("slow", stalled), outgoing("quick", fine)
    sender.push(range(1), [Part(slow, [1], [1])])
    sender.push(range(1), [Part(quick, [2], [1])])
    assert passed(sender, quick)
    assert fine.buffer[1] == 2
    assert slow.num_writes == 0
    transport.stalled[stalled.region.name].set()
    assert passed(sender, slow)
    sender.close()


def test_a_prompt_is_handed_over_while_the_next_step_is_computed(transport: Counting) -> None:
    """An engine that runs ahead queues the writes of its next step before it knows this one's tokens."""
    slab, computing = transport.allocate("kv", 8), Computing()
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    done, next_step = outgoing("done", slab), outgoing("next", slab)
    sender.push(range(1), [Part(done, [5], [1])])
    sender.push(range(1), [Part(next_step, [6], [2])], computing)
    late = threading.Event()
    sender.fence(next_step, late.set)
    assert passed(sender, done)
    assert slab.buffer[1] == 5
    assert not late.is_set()
    computing.end()
    assert late.wait(60)
    assert slab.buffer[2] == 6
    sender.close()


def test_what_fails_behind_a_transfer_holds_up_no_other(transport: Counting) -> None:
    slab, computing = transport.allocate("kv", 8), Computing()
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    transfer = outgoing("t", slab)

    def fail() -> None:
        raise RuntimeError("the loop is closed")

    sender.push(range(1), [Part(transfer, [5], [1])], computing)
    sender.fence(transfer, fail)
    after = threading.Event()
    sender.fence(transfer, after.set)
    computing.end()
    assert after.wait(60)
    sender.push(range(1), [Part(transfer, [6], [2])])
    assert passed(sender, transfer)
    assert slab.buffer[2] == 6
    sender.close()


def test_the_first_contact_is_made_once_and_measured(transport: Counting) -> None:
    slab = transport.allocate("kv", 8)
    contacts: list[int] = []
    link = ShapedTransport(transport, None, 0.02)
    sender = KVSender(
        link, Source(), GroupSizer(num_layers=1), time.monotonic, lambda nbytes, seconds: contacts.append(nbytes)
    )
    for _ in range(3):
        sender.connect(slab.region)
    sender.close()
    assert contacts == [0]
    assert transport.writes == [(slab.region.name, 0)] * 2
    assert 0.02 <= sender.sizer.links[slab.region.name].base_s < 5


class OverDevice(Source):
    """Says whether it can map the other device's memory, and keeps what is written there."""

    def __init__(self, *, reaches: bool) -> None:
        super().__init__(staged_cells=2)
        self.reaches = reaches
        self.written: list[tuple[range, list[int], list[int]]] = []
        self.num_mapped = self.num_unmapped = 0

    @contextmanager
    def mapped(self, region: Region) -> Iterator[RemoteWrite]:
        if not self.reaches:
            raise ValueError("peer access is not supported")
        self.num_mapped += 1
        yield self.write
        self.num_unmapped += 1

    def write(
        self,
        layers: range,
        blocks: Sequence[int],
        remote: Sequence[int],
    ) -> None:
        self.written.append((layers, list(blocks), list(remote)))


@pytest.mark.parametrize("reaches", [True, False])
def test_a_device_that_can_be_reached_is_written_to_and_another_one_is_offered(
    transport: Counting, reaches: bool
) -> None:
    """Mapped once, all of a push at once, under the lock by which its owner sees it; else in rounds as ever."""
    slab = transport.allocate("kv", 8)
    region = msgspec.structs.replace(slab.region, device="cuda", handle=b"handle")
    source, offers = OverDevice(reaches=reaches), list[KVOffer]()
    sender = KVSender(transport, source, GroupSizer(num_layers=2, fixed=2), time.monotonic)

    def take(offer: KVOffer) -> KVTaken:
        offers.append(offer)
        return KVTaken([part.transfer_id for part in offer.parts])

    sender.connect(region)
    for number in range(3):
        transfer = outgoing(f"t{number}", slab)
        transfer.target = ReserveReply([2, 4, 6], 0, region, 8, staged_cells=2)
        transfer.offer = take
        sender.push(range(2), [Part(transfer, [1, 3, 5], [2, 4, 6])])
        assert passed(sender, transfer) and transfer.error is None and transfer.num_bytes == 6
    expired = outgoing("late", slab, lifetime_s=-1.0)
    expired.target = transfer.target
    sender.push(range(2), [Part(expired, [1], [2])])
    assert passed(sender, expired) and "lease" in str(expired.error)
    assert is_being_written(region, MAPPED_SLOT) == reaches
    writes = [write for write in source.written if write[1]]
    assert writes == [(range(2), [1, 3, 5], [2, 4, 6])] * (3 if reaches else 0)
    assert len(offers) == (0 if reaches else 12), "two cells at a time"
    sender.close()
    assert source.num_mapped == source.num_unmapped == int(reaches)
    assert not is_being_written(region, MAPPED_SLOT) and not transport.writes


def test_a_peer_that_is_gone_fails_its_transfer_and_no_contact_is_an_error(transport: Counting) -> None:
    region = Region(
        name="gone", nbytes=8, host_id=transport.allocate("x", 1).region.host_id, pid=1, fd=999, host="", port=0
    )
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    sender.connect(region)
    transfer = OutgoingTransfer("t", ReserveReply([1], 0, region, 8), time.monotonic() + 60)
    sender.push(range(1), [Part(transfer, [1], [1])])
    assert passed(sender, transfer)
    assert isinstance(transfer.error, TransferError)
    sender.close()


@given(
    writes=st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 2)), min_size=1, max_size=8),
    computed_after=st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_what_is_exposed_is_what_was_written_after_the_prompt(
    writes: list[tuple[float, float]], computed_after: int
) -> None:
    """Each write begins some time after the one before it and takes some; the prompt ends between two of them."""
    now = [0.0]
    durations = iter(writes)

    class Timed(Counting):
        def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
            now[0] += next(durations)[1]

    transport = Timed()
    slab = transport.allocate("kv", 8)
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), lambda: now[0])
    transfer = OutgoingTransfer("t", target(slab), 1e9)

    class Idle(CpuEvent):
        def __init__(self, seconds: float, is_last: bool) -> None:
            super().__init__()
            self._seconds, self._is_last = seconds, is_last

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            if self._is_last:
                transfer.computed_at = now[0] + self._seconds / 2
            now[0] += self._seconds

    for count, (pause_s, _) in enumerate(writes):
        sender.push(range(1), [Part(transfer, [1], [1])], Idle(pause_s, count == computed_after))
    assert passed(sender, transfer)
    sender.close()
    transport.close()
    exposed = sum(duration for _, duration in writes[computed_after:])
    assert transfer.transfer_s == pytest.approx(sum(duration for _, duration in writes))
    assert transfer.exposed_s == pytest.approx(exposed)
    assert transfer.overlap_ratio == pytest.approx(1 - exposed / transfer.transfer_s)
    if computed_after < len(writes):
        assert transfer.wait_s == pytest.approx(now[0] - (transfer.computed_at or 0.0))


class Board:
    """A device and a link that move ``now`` themselves.

    Attributes:
        computes: parts of the device's work that are done behind each write.
        num_computed: parts that are done.
        begun: set when all is queued.
    """

    def __init__(self, handshake_s: float = 4.0, byte_s: float = 0.125) -> None:
        self.transport = EmbeddedTransport(path="shm")
        self.slab = self.transport.allocate("kv", 40 * 40)
        self.handshake_s, self.byte_s = handshake_s, byte_s
        self.computes: Iterator[int] = iter(())
        self.now, self.num_computed, self.num_writes = 0.0, 0, 0
        self.begun = threading.Event()

    def sender(self, source: Source, sizer: GroupSizer, *, knows_link: bool) -> KVSender:
        for nbytes in (0, 8) if knows_link else ():
            sizer.observe_transfer(self.slab.region.name, nbytes, self.handshake_s + nbytes * self.byte_s)
        return KVSender(self, source, sizer, lambda: self.now)  # type: ignore[arg-type]

    def transfers(self, *names: str) -> list[OutgoingTransfer]:
        replies = [ReserveReply([10 * number], 0, self.slab.region, 40) for number in range(len(names))]
        return [OutgoingTransfer(name, reply, 1e9) for name, reply in zip(names, replies, strict=True)]

    def close(self, sender: KVSender) -> None:
        """Have all done that is queued."""
        self.begun.set()
        sender.close()
        self.transport.close()

    def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
        self.transport.write(region, pieces, transfer_ids)
        self.now += self.handshake_s + self.byte_s * sum(data.nbytes for _, data in pieces)
        self.num_computed += next(self.computes, 0)
        self.num_writes += 1


class Launched(CpuEvent):
    """The end of the part of the device's work with a number."""

    def __init__(self, board: Board, number: int) -> None:
        super().__init__()
        self._board, self._number = board, number

    def query(self) -> bool:
        return self._board.num_computed > self._number

    def synchronize(self) -> None:
        assert self._board.begun.wait(60)
        self._board.num_computed = max(self._board.num_computed, self._number + 1)


@given(
    steps=st.lists(
        st.tuples(st.dictionaries(st.integers(0, 2), st.integers(0, 3), min_size=1), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    computes=st.lists(st.integers(0, 5), max_size=12),
    knows_link=st.booleans(),
    fixed=st.sampled_from([None, None, 2]),
    staged_cells=st.sampled_from([None, 2]),
    cancelled=st.sets(st.integers(0, 2), max_size=1),
)
@settings(max_examples=100, deadline=None)
def test_late_writes_go_together_and_each_fence_is_passed_once_behind_its_own_bytes(
    steps: list[tuple[dict[int, int], int]],
    computes: list[int],
    knows_link: bool,
    fixed: int | None,
    staged_cells: int | None,
    cancelled: set[int],
) -> None:
    """Each step has new blocks of some transfers, and sends the last one of the step before again."""
    board = Board()
    board.computes = iter(computes)
    computed: dict[tuple[int, int], Launched] = {}

    class Checked(Source):
        @contextmanager
        def stage(self, layers: range, blocks: Sequence[int]) -> Iterator[Staged]:
            assert all(computed[layer, block].query() for layer in layers for block in blocks)
            with super().stage(layers, blocks) as staged:
                yield staged

    sizer = GroupSizer(num_layers=3, fixed=fixed)
    sender = board.sender(Checked(staged_cells), sizer, knows_link=knows_link)
    transfers = board.transfers("0", "1", "2")
    for number in cancelled:
        transfers[number].cancelled = True
    sent, num_pushes = [0, 0, 0], 0
    due: dict[int, int] = {}  # the byte of each place
    passed: list[str] = []

    def pass_(transfer: OutgoingTransfer) -> None:
        own = range(transfer.target.block_ids[0], transfer.target.block_ids[0] + 10) if transfer.target else ()
        assert all(board.slab.buffer[place] == byte for place, byte in due.items() if place % 40 in own)
        passed.append(transfer.transfer_id)

    for counts, group in steps:
        parts = []
        for number, count in counts.items():
            first, sent[number] = sent[number], min(sent[number] + count, 9)
            remote = range(10 * number + first, 10 * number + sent[number] + 1)
            parts.append(Part(transfers[number], [100 + place for place in remote], remote))
        for end in sorted(group_ends(3, group)):
            layers, event = range(max(end + 1 - group, 0), end + 1), Launched(board, num_pushes)
            for layer, part in product(layers, parts):
                for here, there in zip(part.local, part.remote, strict=True):
                    computed.setdefault((layer, here), event)
                    if not part.transfer.cancelled:
                        due[layer * 40 + there] = here
            sender.push(layers, parts, event)
            num_pushes += 1
    for transfer in transfers:
        sender.fence(transfer, partial(pass_, transfer))
    board.close(sender)
    assert [transfer.error for transfer in transfers] == [None] * 3
    assert bytes(board.slab.buffer) == bytes(due.get(place, 0) for place in range(1600))
    assert sorted(passed) == ["0", "1", "2"], "each once, with its bytes"
    if staged_cells is None and not cancelled:
        assert board.num_writes == num_pushes if fixed else board.num_writes <= num_pushes


@given(
    num_layers=st.integers(1, 40),
    group=st.integers(1, 40),
    layer=st.integers(0, 9),
    send=st.integers(0, 9),
    handshake=st.integers(0, 40),
    free=st.integers(0, 100),
)
@settings(deadline=None)
def test_the_sender_takes_the_time_that_is_reckoned(
    num_layers: int, group: int, layer: int, send: int, handshake: int, free: int
) -> None:
    """By groups' sizes and by the simulator."""
    board, group = Board(handshake, send), min(group, num_layers)

    class Layers(Launched):
        """Computed one after the other, in the time that the link takes meanwhile."""

        def query(self) -> bool:
            return board.now >= self._number * layer

        def synchronize(self) -> None:
            assert board.begun.wait(60)
            board.now = max(board.now, self._number * layer)

    board.now = free
    sender = board.sender(Source(), GroupSizer(num_layers=num_layers), knows_link=False)
    (transfer,) = board.transfers("t")
    parts = [Part(transfer, [1], [2])]
    for end in sorted(group_ends(num_layers, group)):
        sender.push(range(max(end + 1 - group, 0), end + 1), parts, Layers(board, end + 1))
    board.close(sender)
    assert board.now == seconds_until_sent(num_layers, group, layer, send, handshake, free_s=free)


def test_layers_that_are_computed_go_at_once_and_so_do_steps_of_few_bytes() -> None:
    board = Board(handshake_s=4.0, byte_s=0.5)
    board.computes = iter([100])
    sender = board.sender(Source(), GroupSizer(num_layers=3), knows_link=True)
    one, two, large = board.transfers("one", "two", "large")
    for step, (transfer, blocks) in enumerate(((one, [1]), (two, [2]), (large, [3, 4, 5]))):
        parts = [Part(transfer, blocks, blocks)]
        for layer in range(3):
            sender.push(range(layer, layer + 1), parts, Launched(board, 3 * step + layer))
    board.close(sender)
    assert board.num_writes == 4, "the first layer, the rest of its step, and two steps of which one is large"
    assert (one.num_writes, two.num_writes, large.num_writes) == (2, 1, 1)
