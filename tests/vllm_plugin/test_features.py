"""Features of vLLM instances in shared memory: books, arrivals, and what is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.errors import InstanceFailed
from epd_serve.protocol.wire import FeatureWithdrawn
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.vllm_plugin.announced_features import AnnouncedFeatures, FeatureMemory
from epd_serve.vllm_plugin.links import LinkThread

CAPACITY = 1024


class MemoryMachine(RuleBasedStateMachine):
    """Against a dictionary: what is held stays as it was put."""

    def __init__(self) -> None:
        super().__init__()
        self.transport = EmbeddedTransport(path="shm")
        self.memory = FeatureMemory(self.transport, CAPACITY)
        self.held: dict[tuple[str, str], bytes] = {}

    @rule(name=st.sampled_from("abcdef"), owner=st.sampled_from("xyz"), size=st.integers(1, 600))
    def put(self, name: str, owner: str, size: int) -> None:
        data = name.encode() * size
        kept = self.memory.put(name, memoryview(data), [size], "uint8", owner)
        if kept is not None:
            self.held[owner, name] = name.encode() * kept.nbytes
        else:
            in_use = {name: len(data) for (_, name), data in self.held.items()}
            assert sum(in_use.values()) + size > CAPACITY / 3

    @rule(name=st.sampled_from("abcdef"), owner=st.sampled_from("xyz"))
    def acquire(self, name: str, owner: str) -> None:
        kept = self.memory.acquire(name, owner)
        assert (kept is not None) == (name in self.memory)
        if kept is not None:
            self.held[owner, name] = name.encode() * kept.nbytes

    @rule(owner=st.sampled_from("xyz"))
    def release(self, owner: str) -> None:
        self.memory.release(owner)
        self.held = {key: data for key, data in self.held.items() if key[0] != owner}

    @invariant()
    def what_is_held_is_there(self) -> None:
        self.memory.check_integrity()
        for (owner, name), data in self.held.items():
            kept = self.memory.acquire(name, owner)
            assert kept is not None
            read = bytearray(kept.nbytes)
            self.transport.read(self.memory.region, [(kept.offset, memoryview(read))])
            assert read == data

    def teardown(self) -> None:
        self.transport.close()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class Peers:
    """E's memory and P's announced, over one transport each."""

    def __init__(self, clock: Callable[[], float], capacity: int = CAPACITY) -> None:
        self.transports = [EmbeddedTransport(path="shm"), EmbeddedTransport(path="shm")]
        self.memory = FeatureMemory(self.transports[0], CAPACITY)
        self.announced = AnnouncedFeatures(self.transports[1], capacity, timeout_s=10, clock=clock)

    def announce(self, mm_hash: str, data: bytes = b"feature", checksum: str = "") -> None:
        kept = self.memory.put(mm_hash, memoryview(data), [len(data)], "uint8", "e", checksum)
        assert kept is not None
        try:
            self.announced.fetch(kept.event(mm_hash, "r", region=self.memory.region))
        finally:
            self.memory.release("e", mm_hash)


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def peers(now: list[float]) -> Peers:
    return Peers(lambda: now[0])


def test_a_request_waits_for_its_feature_or_its_withdrawal_or_gives_a_late_one_up(
    peers: Peers, now: list[float]
) -> None:
    announced = peers.announced
    assert not announced.is_settled("engine-r", "r", "a")
    peers.announce("a")
    assert announced.is_settled("engine-r", "r", "a") and announced.hold("engine-r", "a")
    found = announced.locate("a", "engine-r")
    assert found is not None
    data = bytearray(found[1].nbytes)
    peers.transports[1].read(found[0], [(found[1].offset, memoryview(data))])
    assert data == b"feature"
    announced.forget("engine-r")
    announced.withdraw("r", "b")
    assert announced.is_settled("engine-r", "r", "b") and not announced.hold("engine-r", "b")
    assert not announced.is_settled("engine-s", "s", "b"), "another request"
    now[0] = 9.9
    assert not announced.is_settled("engine-s", "s", "b")
    now[0] = 10.0
    assert announced.is_settled("engine-s", "s", "b") and not announced.hold("engine-s", "b")
    announced.check_integrity()


def test_a_feature_larger_than_the_cache_is_encoded_here(now: list[float]) -> None:
    peers = Peers(lambda: now[0], capacity=64)
    with pytest.raises(InstanceFailed, match="no room"):
        peers.announce("a", bytes(100))
    assert peers.announced.is_settled("engine-r", "r", "a")


def test_a_present_feature_is_kept_for_its_announced_request(peers: Peers) -> None:
    peers.announce("a", bytes(400))
    assert peers.announced.hold("engine-r", "a")
    peers.announced.forget("engine-r")
    peers.announce("a", bytes(400))
    with pytest.raises(InstanceFailed, match="no room"):
        peers.announce("large", bytes(800))
    assert peers.announced.hold("engine-s", "a")
    peers.announced.forget("engine-s")
    peers.announced.check_integrity()


def test_a_feature_that_arrived_and_was_evicted_is_not_waited_for(peers: Peers) -> None:
    peers.announce("a", bytes(600))
    assert peers.announced.hold("engine-r", "a")
    peers.announced.forget("engine-r")
    peers.announce("b", bytes(600))
    assert peers.announced.is_settled("engine-s", "r", "a") and not peers.announced.hold("engine-s", "a")


def test_waiting_ends_when_a_feature_arrives(peers: Peers) -> None:
    """So that vLLM need not step again and again for nothing."""
    for arrive in (lambda: peers.announce("a"), lambda: peers.announced.withdraw("r", "b")):
        thread = threading.Timer(0.05, arrive)
        began = time.monotonic()
        thread.start()
        peers.announced.wait(60)
        assert time.monotonic() - began < 30
        thread.join()


def test_features_are_announced_and_withdrawn_over_links(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    served, calling = LinkThread(), LinkThread()
    address = f"127.0.0.1:{served.serve('127.0.0.1', 0, peers.announced.calls)}"
    kept = peers.memory.put("a", memoryview(b"feature"), [7], "uint8", "e")
    assert kept is not None
    calling.send(address, "/feature/event", kept.event("a", "r", region=peers.memory.region)).result(60)
    assert peers.announced.hold("engine-r", "a")
    wrong = msgspec.structs.replace(kept.event("b", "r", region=peers.memory.region), checksum="0" * 64)
    calling.send(address, "/feature/event", wrong).result(60)
    assert "fails its checksum" in caplog.text and peers.announced.is_settled("engine-r", "r", "b")
    calling.send(address, "/feature/withdraw", FeatureWithdrawn("r", "c")).result(60)
    assert peers.announced.is_settled("engine-r", "r", "c")
    calling.close()
    served.close()
