"""The sender: whatever one transfer meets, the others go out, every fence is passed, the times add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.cpu import CpuEvent
from epd_serve.protocol.wire import KVAnnouncement, KVTaken, Region, ReserveReply
from epd_serve.transfer.grouping import GroupSizer, group_ends, seconds_until_sent
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.transport import TransferError

Spans = list[list[tuple[int, int]]]


class Source:
    """One byte for each block and layer, at a place that tells both. Block 13 cannot be read, as on an accelerator
    whose copy fails."""

    region = Region(name="kv", nbytes=1000, host_id="h", pid=1, fd=1, host="", port=0)
    buffer = memoryview(b"")

    def __init__(self, staged_cells: int | None = None) -> None:
        self.staged_cells = staged_cells
        self.most_staged = 0

    @contextmanager
    def stage(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[Spans]:
        blocks = [block for part in parts for block in part]
        self.most_staged = max(self.most_staged, len(layers) * len(blocks))
        if 13 in blocks:
            raise RuntimeError("out of memory")
        yield [[(layer * 1000 + block, 1) for layer in layers for block in part] for part in parts]

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks


class Transfer(OutgoingTransfer):
    """A transfer to a decode instance, whose first contact takes no time."""

    def __init__(self, name: str, decoder: Decoder, target: ReserveReply) -> None:
        super().__init__(name, target)
        self._decoder = decoder

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        return self._decoder.announce(announcement) if announcement.parts else self._decoder.greet()


class Decoder:
    """A decode instance that reads at once what is announced: of each block its number.

    Attributes:
        memory: [layer][block], or 0.
        read: bytes of each announcement.
        refused: transfers that it has given up.
        goes_on: cleared while it stalls.
    """

    def __init__(self, name: str = "d0", num_blocks: int = 8, num_layers: int = 1) -> None:
        self.name, self.num_blocks = name, num_blocks
        self.memory = [[0] * num_blocks for _ in range(num_layers)]
        self.read: list[int] = []
        self.announced: list[KVAnnouncement] = []
        self.refused: set[str] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def greet(self) -> KVTaken:
        return KVTaken([])

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        assert self.goes_on.wait(300)
        taken = [part for part in announcement.parts if part.transfer_id not in self.refused]
        for part in taken:
            for number, (offset, _) in enumerate(part.spans):
                layer = announcement.first_layer + number // len(part.block_ids)
                assert offset // 1000 == layer
                self.memory[layer][part.block_ids[number % len(part.block_ids)]] = offset % 1000
        self.announced.append(announcement)
        self.read.append(sum(len(part.spans) for part in taken))
        return KVTaken([part.transfer_id for part in taken])

    def transfer(self, name: str, **reply: object) -> OutgoingTransfer:
        return Transfer(name, self, ReserveReply([2], 0, self.name, **reply))  # type: ignore[arg-type]


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


class Failing(CpuEvent):
    def synchronize(self) -> None:
        raise RuntimeError("out of memory")


class Gone(Decoder):
    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        raise TransferError("it is out of memory")


class Strange(Gone):
    def greet(self) -> KVTaken:
        raise ValueError("no answer of this version")


@pytest.mark.parametrize(
    ("peer", "block", "computed"),
    [(Decoder, 13, None), (Decoder, 7, Failing), (Gone, 7, None), (Strange, 7, None)],
    ids=range(4),
)
def test_a_transfer_that_fails_announces_nothing_more_and_takes_no_other_along(
    peer: type[Decoder], block: int, computed: type[CpuEvent] | None
) -> None:
    """Its copy, its step on the device, or its decode instance fails."""
    failing_at = peer("d1")
    decoder = failing_at if peer is Decoder else Decoder()
    sender = KVSender(Source(), GroupSizer(num_layers=1), time.monotonic)
    failing, fine = failing_at.transfer("failing"), decoder.transfer("fine")
    sender.push(range(1), [Part(failing, [block], [3])], computed and computed())
    sender.push(range(1), [Part(failing, [8], [4])])
    sender.push(range(1), [Part(fine, [9], [2])])
    assert passed(sender, failing) and passed(sender, fine)
    assert "out of memory" in str(failing.error) and fine.error is None
    assert decoder.memory == [[0, 0, 9, 0, 0, 0, 0, 0]]
    sender.close()


def test_a_step_is_one_announcement_without_transfers_that_have_ended() -> None:
    decoder = Decoder(num_layers=2)
    sender = KVSender(Source(), GroupSizer(num_layers=2), time.monotonic)
    one, two, gone, failed = (decoder.transfer(name) for name in ("one", "two", "gone", "failed"))
    gone.cancelled, failed.error = True, TransferError("it failed")
    parts = [Part(one, [5, 6], [1, 2]), Part(gone, [7], [3]), Part(two, [8], [4]), Part(failed, [9], [5])]
    sender.push(range(2), parts)
    assert passed(sender, two)
    assert decoder.read == [6]
    assert decoder.memory == [[0, 5, 6, 0, 8, 0, 0, 0]] * 2
    assert (one.num_bytes, two.num_bytes, gone.num_bytes) == (4, 2, 0)
    assert one.transfer_s == pytest.approx(2 * two.transfer_s)
    sender.close()


def test_what_is_larger_than_the_staging_memory_of_either_side_goes_in_rounds() -> None:
    decoder, source = Decoder(num_layers=3), Source(staged_cells=4)
    decoder.refused.add("given up")
    sender = KVSender(source, GroupSizer(num_layers=3), time.monotonic)
    one, two, gone = (decoder.transfer(name, staged_cells=3) for name in ("one", "two", "given up"))
    sender.push(range(3), [Part(one, [5, 6], [1, 2]), Part(gone, [8], [4]), Part(two, [9, 7], [3, 6])])
    assert passed(sender, two)
    assert source.most_staged <= 3
    assert decoder.memory == [[0, 5, 6, 9, 0, 0, 7, 0]] * 3
    offered = [part.transfer_id for message in decoder.announced for part in message.parts]
    assert offered.count("given up") == 1, "it is not announced again"
    assert gone.cancelled and not one.cancelled
    assert (one.num_bytes, two.num_bytes, gone.num_bytes) == (6, 6, 0)
    sender.close()


def test_blocks_are_named_where_the_decode_instance_maps_the_device() -> None:
    """All of a push at once: nothing passes the staging memory."""
    decoder, source = Decoder(num_layers=2), Source(staged_cells=2)
    sender = KVSender(source, GroupSizer(num_layers=2), time.monotonic)
    transfer = decoder.transfer("t", staged_cells=2, maps=True)
    sender.push(range(2), [Part(transfer, [1, 3, 5], [2, 4, 6])])
    assert passed(sender, transfer) and transfer.error is None and transfer.num_bytes == 6
    (announcement,) = decoder.announced
    (part,) = announcement.parts
    assert (part.source_ids, part.block_ids, part.spans) == ([1, 3, 5], [2, 4, 6], [])
    assert source.most_staged == 0
    sender.close()


def test_a_stalled_decode_instance_holds_up_no_other() -> None:
    stalled, fine = Decoder("stalled"), Decoder("fine")
    stalled.goes_on.clear()
    sender = KVSender(Source(), GroupSizer(num_layers=1), time.monotonic)
    slow, quick = stalled.transfer("slow"), fine.transfer("quick")
    sender.push(range(1), [Part(slow, [1], [1])])
    sender.push(range(1), [Part(quick, [2], [1])])
    assert passed(sender, quick)
    assert fine.memory[0][1] == 2
    assert slow.num_announcements == 0
    stalled.goes_on.set()
    assert passed(sender, slow)
    sender.close()


def test_a_prompt_is_handed_over_while_the_next_step_is_computed() -> None:
    """An engine that runs ahead queues the writes of its next step before it knows this one's tokens."""
    decoder, computing = Decoder(), Computing()
    sender = KVSender(Source(), GroupSizer(num_layers=1), time.monotonic)
    done, next_step = decoder.transfer("done"), decoder.transfer("next")
    sender.push(range(1), [Part(done, [5], [1])])
    sender.push(range(1), [Part(next_step, [6], [2])], computing)
    late = threading.Event()
    sender.fence(next_step, late.set)
    assert passed(sender, done)
    assert decoder.memory[0][1] == 5
    assert not late.is_set()
    computing.end()
    assert late.wait(60)
    assert decoder.memory[0][2] == 6
    sender.close()


@given(
    writes=st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 2)), min_size=1, max_size=8),
    computed_after=st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_after_the_prompt_is_exposed(
    writes: list[tuple[float, float]], computed_after: int
) -> None:
    """Each write begins some time after the one before it and takes some; the prompt ends between two of them."""
    now = [0.0]
    durations = iter(writes)

    class Timed(Decoder):
        def announce(self, announcement: KVAnnouncement) -> KVTaken:
            now[0] += next(durations)[1]
            return super().announce(announcement)

    sender = KVSender(Source(), GroupSizer(num_layers=1), lambda: now[0])
    transfer = Timed().transfer("t")

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
    exposed = sum(duration for _, duration in writes[computed_after:])
    assert transfer.transfer_s == pytest.approx(sum(duration for _, duration in writes))
    assert transfer.exposed_s == pytest.approx(exposed)
    assert transfer.overlap_ratio == pytest.approx(1 - exposed / transfer.transfer_s)
    if computed_after < len(writes):
        assert transfer.wait_s == pytest.approx(now[0] - (transfer.computed_at or 0.0))


class Board(Decoder):
    """A device and a link that move ``now`` themselves.

    Attributes:
        computes: parts of the device's work that are done behind each read.
        num_computed: parts that are done.
        begun: set when all is queued.
    """

    def __init__(self, handshake_s: float = 4.0, byte_s: float = 0.125) -> None:
        super().__init__(num_blocks=40, num_layers=40)
        self.handshake_s, self.byte_s = handshake_s, byte_s
        self.computes: Iterator[int] = iter(())
        self.now, self.num_computed = 0.0, 0
        self.begun = threading.Event()

    def sender(self, source: Source, sizer: GroupSizer, *, knows_link: bool) -> KVSender:
        for nbytes in (0, 8) if knows_link else ():
            sizer.observe_transfer(self.name, nbytes, self.handshake_s + nbytes * self.byte_s)
        return KVSender(source, sizer, lambda: self.now)

    def transfers(self, *names: str) -> list[OutgoingTransfer]:
        replies = [ReserveReply([10 * number], 0, self.name) for number in range(len(names))]
        return [Transfer(name, self, reply) for name, reply in zip(names, replies, strict=True)]

    def close(self, sender: KVSender) -> None:
        """Have all done that is queued."""
        self.begun.set()
        sender.close()

    def announce(self, announcement: KVAnnouncement) -> KVTaken:
        taken = super().announce(announcement)
        self.now += self.handshake_s + self.byte_s * self.read[-1]
        self.num_computed += next(self.computes, 0)
        return taken


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
        def stage(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[Spans]:
            assert all(computed[layer, block].query() for layer in layers for part in parts for block in part)
            with super().stage(layers, parts) as staged:
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
        assert all(
            board.memory[place // 40][place % 40] == byte for place, byte in due.items() if place % 40 in own
        )
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
    assert [byte for layer in board.memory for byte in layer] == [due.get(place, 0) for place in range(1600)]
    assert sorted(passed) == ["0", "1", "2"], "each once, with its bytes"
    if staged_cells is None and not cancelled:
        assert len(board.read) == num_pushes if fixed else len(board.read) <= num_pushes


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
