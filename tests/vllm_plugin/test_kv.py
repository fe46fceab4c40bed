"""KV from P's memory to D's over real sockets, as the connectors of two vLLM processes do it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from epd_serve.protocol.engine_notices import FeatureWithdrawn, KVUnwanted, KVWanted, pack, unpack
from epd_serve.protocol.wire import Region
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.shaped import ShapedTransport
from epd_serve.vllm_plugin.kv_layout import LayerMemory, layer_memory
from epd_serve.vllm_plugin.kv_receiving import KVReceiver, Receive
from epd_serve.vllm_plugin.kv_sending import Chunk, KVHandOvers
from epd_serve.vllm_plugin.notices import Conversation, NoticeRefused, NoticeServer

NUM_LAYERS, BLOCKS_AT_P, BLOCKS_AT_D = 3, 8, 12
#: Of four blocks, keys and values.
LAYER_BYTES, LAYER_S = 4 * 2 * 2 * 4 * 8 * 4, 0.5


def caches(num_blocks: int) -> list[torch.Tensor]:
    """Keys and values apart, as vLLM keeps them on a CPU."""
    return [torch.zeros(2, num_blocks, 2, 4, 8) for _ in range(NUM_LAYERS)]


def memories(tensors: list[torch.Tensor]) -> list[LayerMemory]:
    return [layer_memory(one, one.shape[1]) for one in tensors]


def chunk_of(blocks: list[int], *, first_block: int = 0, last: bool = True, name: str = "r") -> Chunk:
    return Chunk(
        request_id=f"p-{name}",
        transfer_id=f"t-{name}",
        prompt="hello",
        first_block=first_block,
        blocks=blocks,
        num_tokens=4 * len(blocks),
        last=last,
    )


@dataclass
class Sides:
    """P and D."""

    at_p: list[torch.Tensor] = field(default_factory=lambda: caches(BLOCKS_AT_P))
    at_d: list[torch.Tensor] = field(default_factory=lambda: caches(BLOCKS_AT_D))

    def open(
        self,
        trace: Path | None = None,
        lease_s: float = 60.0,
        bytes_per_s: float | None = None,
        joins: bool = False,
    ) -> Sides:
        for number, layer in enumerate(self.at_p):
            layer.copy_(torch.arange(layer.numel()).reshape(layer.shape) + number * 10_000)
        sizer = GroupSizer(num_layers=NUM_LAYERS, fixed=None if joins else 1)
        self.transport = EmbeddedTransport()
        self.link = ShapedTransport(EmbeddedTransport(), bytes_per_s)
        self.sender = KVHandOvers(self.link, memories(self.at_p), sizer, lease_s=lease_s, trace=trace)
        self.server = NoticeServer("127.0.0.1", 0, self.sender.handle)
        self.receiver = KVReceiver(self.transport, memories(self.at_d), timeout_s=20)
        return self

    def close(self) -> None:
        self.server.close()
        self.transport.close()
        self.link.close()

    def want(
        self, blocks: list[int], *, first_block: int = 0, prompt: str = "hello", name: str = "r", port: int = 0
    ) -> None:
        address = f"127.0.0.1:{port or self.server.port}"
        self.receiver.receive(
            Receive(
                request_id=name,
                transfer_id=f"t-{name}",
                address=address,
                prompt=prompt,
                first_block=first_block,
                blocks=blocks,
            )
        )

    def compute(self, blocks: list[int], *, first_block: int = 0, last: bool = True, name: str = "r") -> None:
        chunk = chunk_of(blocks, first_block=first_block, last=last, name=name)
        self.sender.begin(chunk)
        for layer in range(NUM_LAYERS):
            self.sender.push(range(layer, layer + 1), chunk, last=layer == NUM_LAYERS - 1)

    def ended(self) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()

        def have() -> bool:
            ended = self.receiver.take_ended()
            done.update(ended.done)
            failed.update(ended.failed)
            return bool(done)

        until(have)
        return done, failed

    def wait_until_asked(self, name: str = "r") -> None:
        """P has heard of D."""
        transfers = self.sender._transfers
        until(lambda: (transfer := transfers.get(f"t-{name}")) is not None and transfer.target is not None)

    def check(self, pairs: dict[int, int]) -> None:
        """Blocks of P are those of D, and no other block of D was written to."""
        for here, there in zip(self.at_p, self.at_d, strict=True):
            for block in range(BLOCKS_AT_D):
                source = next((p for p, d in pairs.items() if d == block), None)
                expected = torch.zeros_like(there[:, 0]) if source is None else here[:, source]
                assert torch.equal(there[:, block], expected), block

    def check_empty(self) -> None:
        self.sender.check_integrity()
        assert self.receiver.num_open == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides().open()
    yield sides
    sides.close()


@pytest.mark.parametrize("d_first", [True, False])
def test_a_prompt_arrives_whoever_comes_first(sides: Sides, d_first: bool) -> None:
    if d_first:
        sides.want([5, 6, 2])
        sides.wait_until_asked()
    sides.compute([1, 2, 7])
    if not d_first:
        sides.want([5, 6, 2])
    assert sides.ended() == ({"r"}, set())
    sides.check({1: 5, 2: 6, 7: 2})
    sides.sender.finish("t-r", computed=True)
    assert sides.sender.take_sent() == {"p-r"}
    sides.check_empty()


def test_who_waits_for_transfers_wakes_up_with_them(sides: Sides) -> None:
    """So that vLLM need not step again and again; where there is nothing to wait for, it goes on at once."""
    began = time.monotonic()
    sides.sender.wait(60)
    sides.receiver.wait(60)
    sides.want([5, 6, 2])
    sides.wait_until_asked()
    later = threading.Timer(0.05, sides.compute, [[1, 2, 7]])
    later.start()
    sides.receiver.wait(60)
    assert sides.receiver.take_ended().done == {"r"}
    later.join()
    sides.compute([1, 2, 7], name="s")
    sides.sender.finish("t-s", computed=True)
    later = threading.Timer(0.05, sides.sender.handle, [KVUnwanted(transfer_id="t-s"), bool])
    later.start()
    sides.sender.wait(60)
    assert "p-s" in sides.sender.take_sent()
    later.join()
    assert time.monotonic() - began < 30


def test_chunks_and_what_d_has_already(sides: Sides) -> None:
    sides.want([9, 8, 7], first_block=1)
    sides.compute([0, 1], last=False)
    sides.compute([1, 2, 3], first_block=1)
    assert sides.ended() == ({"r"}, set())
    sides.check({1: 9, 2: 8, 3: 7})


def test_blocks_stay_at_p_until_they_are_sent(sides: Sides) -> None:
    sides.compute([1])
    sides.sender.finish("t-r", computed=True)
    assert sides.sender.take_sent() == set()
    sides.want([3])
    assert sides.ended() == ({"r"}, set())
    until(lambda: sides.sender.take_sent() == {"p-r"})
    sides.check_empty()


def test_a_d_that_takes_nothing_holds_no_other_up(sides: Sides) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        region = Region(
            name="kv",
            nbytes=sum(layer.numel() * 4 for layer in sides.at_d),
            host_id="",
            pid=1,
            fd=-1,
            host="127.0.0.1",
            port=stalled.getsockname()[1],
        )
        layer = memories(sides.at_d)[0]
        wanted = KVWanted(
            transfer_id="t-stalled",
            prompt="hello",
            first_block=0,
            block_ids=[3],
            region=region,
            num_layers=NUM_LAYERS,
            planes=layer.planes,
            block_bytes=layer.block_bytes,
        )
        has_left = threading.Event()
        d = threading.Thread(target=sides.sender.handle, args=(wanted, has_left.is_set))
        d.start()
        sides.compute([1], name="stalled")
        connection, _ = stalled.accept()
        with connection:
            sides.want([3])
            sides.compute([1])
            assert sides.ended() == ({"r"}, set())
        has_left.set()
        d.join()
    sides.check({1: 3})


@pytest.mark.parametrize("d_first", [True, False])
def test_different_prompts_are_not_mixed(sides: Sides, d_first: bool) -> None:
    if d_first:
        sides.want([3], prompt="something else")
        sides.wait_until_asked()
    sides.compute([1])
    sides.sender.finish("t-r", computed=True)
    if not d_first:
        sides.want([3], prompt="something else")
    assert sides.ended() == ({"r"}, {"r"})
    sides.check({})
    until(lambda: sides.sender.take_sent() == {"p-r"})
    sides.check_empty()


def test_a_prompt_that_is_not_computed_fails_d_at_once(sides: Sides) -> None:
    sides.want([3, 4])
    sides.wait_until_asked()
    sides.compute([1], last=False)
    sides.sender.finish("t-r", computed=False)
    assert sides.ended() == ({"r"}, {"r"})
    assert sides.sender.take_sent() == set(), "its blocks are P's again already"
    sides.check_empty()


def test_a_d_that_asks_for_a_prompt_that_was_given_up_is_refused_at_once(sides: Sides) -> None:
    began = time.monotonic()
    sides.sender.finish("t-r", computed=False)
    sides.want([3, 4])
    assert sides.ended() == ({"r"}, {"r"})
    assert time.monotonic() - began < 30
    sides.check_empty()


def test_a_p_that_dies_fails_d_at_once(sides: Sides) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take_and_die() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)

        p = threading.Thread(target=take_and_die)
        p.start()
        sides.want([3], port=listener.getsockname()[1])
        assert sides.ended() == ({"r"}, {"r"})
        p.join()


def test_a_request_that_d_gives_up_is_forgotten_on_both_sides(sides: Sides) -> None:
    sides.want([3])
    sides.compute([1], last=False)
    sides.wait_until_asked()
    sides.receiver.cancel("r")
    assert sides.ended() == ({"r"}, {"r"})
    until(lambda: not sides.sender._transfers or sides.sender._transfers["t-r"].outcome is not None)
    sides.sender.finish("t-r", computed=True)
    assert sides.sender.take_sent() == {"p-r"}
    sides.check_empty()


def test_a_request_that_d_never_asks_for_is_released_when_declined_or_late(sides: Sides) -> None:
    sides.compute([1])
    sides.sender.finish("t-r", computed=True)
    sides.receiver.decline(f"127.0.0.1:{sides.server.port}", "t-r")
    until(lambda: sides.sender.take_sent() == {"p-r"})
    late = Sides().open(lease_s=0.05)
    late.compute([1])
    late.sender.finish("t-r", computed=True)
    until(lambda: late.sender.take_sent() == {"p-r"})
    late.close()


def test_a_record_that_cannot_be_written_holds_nobody_up(tmp_path: Path) -> None:
    sides = Sides().open(trace=tmp_path)
    assert sides.sender._trace is not None
    sides.sender._trace = tmp_path  # as to a full disk, nothing can be written to a directory
    for name in ("first", "second"):
        sides.want([3], name=name)
        sides.compute([1], name=name)
        assert sides.ended() == ({name}, set())
    sides.close()


def test_a_record_says_how_much_of_the_transfer_was_hidden(tmp_path: Path) -> None:
    sides = Sides().open(trace=tmp_path)
    sides.want([3, 4])
    sides.compute([1, 2])
    assert sides.ended() == ({"r"}, set())
    (file,) = tmp_path.iterdir()
    until(lambda: bool(file.read_text()))
    assert '"transfer_id": "t-r"' in file.read_text()
    sides.close()


def test_groups_that_are_late_go_as_one_write(tmp_path: Path) -> None:
    """While the first is on a slow link, the others are computed."""
    sides = Sides().open(trace=tmp_path, bytes_per_s=LAYER_BYTES / LAYER_S, joins=True)
    sides.want([4, 3, 2, 1])
    sides.wait_until_asked()
    sides.compute([0, 1, 2, 3])
    assert sides.ended() == ({"r"}, set())
    sides.check(dict(zip(range(4), [4, 3, 2, 1], strict=True)))
    (file,) = tmp_path.iterdir()
    until(lambda: bool(file.read_text()))
    assert json.loads(file.read_text())["writes"] < NUM_LAYERS
    sides.close()


def overlap(folder: Path, layers_together: int) -> float:
    """A prompt whose layers take as long to compute as their KV takes over a slow link."""
    sides = Sides().open(trace=folder, bytes_per_s=LAYER_BYTES / LAYER_S)
    sides.want([0, 1, 2, 3])
    whole = chunk_of([0, 1, 2, 3])
    sides.sender.begin(whole)
    for layer in range(NUM_LAYERS):
        time.sleep(LAYER_S)
        end = layer + 1
        if end % layers_together == 0:
            sides.sender.push(range(end - layers_together, end), whole, last=end == NUM_LAYERS)
    assert sides.ended() == ({"r"}, set())
    (file,) = folder.iterdir()
    until(lambda: bool(file.read_text()))
    sides.close()
    ratio: float = json.loads(file.read_text())["overlap"]
    return ratio


def test_groups_hide_what_a_transfer_of_the_whole_prompt_does_not(tmp_path: Path) -> None:
    for attempt in range(3):  # a thread that is held up in the middle makes any overlap
        whole, grouped = (tmp_path / f"{name}-{attempt}" for name in ("whole", "grouped"))
        whole.mkdir()
        grouped.mkdir()
        found = overlap(whole, NUM_LAYERS), overlap(grouped, 1)
        if found[0] < 0.2 and found[1] > 0.4:
            break
    assert found[0] < 0.2 and found[1] > 0.4


def test_caches_that_are_not_laid_out_by_blocks_are_refused() -> None:
    assert layer_memory(torch.zeros(7, 2, 3), 7).planes == 1
    with pytest.raises(ValueError, match="not laid out by its 7 blocks"):
        layer_memory(torch.zeros(2, 3, 7), 7)
    with pytest.raises(ValueError, match="has holes"):
        layer_memory(torch.zeros(7, 8)[:, :4], 7)
    with pytest.raises(ValueError, match="this KV cache is on meta"):
        layer_memory(torch.zeros(7, 2, device="meta"), 7)


def test_what_is_no_notice_is_refused() -> None:
    notice = FeatureWithdrawn(request_id="r", mm_hash="a")
    assert unpack(pack(notice)[4:]) == notice
    with pytest.raises(ValueError):
        unpack(b"\x81\xa4type\xa3odd")


def test_a_refusal_is_told_to_who_asks() -> None:
    server = NoticeServer("127.0.0.1", 0, lambda notice, has_left: "no")
    with pytest.raises(NoticeRefused, match="no"):
        Conversation(f"127.0.0.1:{server.port}").ask(FeatureWithdrawn(request_id="r", mm_hash="a"), 5)
    server.close()
