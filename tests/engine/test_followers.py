"""The leader's books of what its followers still owe it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from epd_serve.engine import followers as module
from epd_serve.engine.commands import Command, CopyCells, Done, MapKV, UnmapKV, WriteKV, follower_end, leader_end
from epd_serve.engine.followers import Followers
from epd_serve.protocol.wire import Region
from epd_serve.rpc.link import Link
from epd_serve.transfer.transport import TransferError


@pytest.fixture
def pair() -> Iterator[tuple[Followers, Link[Command]]]:
    """A leader's books without its processes, and the other end of its only link."""
    ours, theirs = socket.socketpair()
    followers = Followers.__new__(Followers)
    followers._links = [leader_end(ours)]
    followers._answers = [queue.SimpleQueue()]
    followers._copying = threading.Lock()
    followers._num_copies = 0
    yield followers, follower_end(theirs)
    ours.close()
    theirs.close()


def test_a_failed_copy_is_over_on_all_ranks_and_a_stale_answer_is_no_answer(
    pair: tuple[Followers, Link[Command]],
) -> None:
    """Else the blocks would be another's, or KV taken for copied, while a rank is still at it."""
    followers, follower = pair
    answered: list[int] = []

    def follow() -> None:
        for _ in range(2):
            command = follower.receive()
            assert isinstance(command, CopyCells)
            for number in (command.number - 1, command.number):
                follower.send(Done(number))
                answered.append(number)
                followers._answers[0].put(followers._links[0].receive())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    with pytest.raises(MemoryError), followers.copying(range(1), [1], 0, lands=False):
        raise MemoryError
    assert answered == [0, 1]
    with followers.copying(range(1), [1], 0, lands=False):
        pass
    assert answered == [0, 1, 1, 2]
    thread.join(5)
    assert followers._answers[0].empty()


def test_a_follower_that_does_not_copy_ends_the_instance(
    pair: tuple[Followers, Link[Command]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(reason: str) -> NoReturn:
        raise SystemExit(reason)

    followers, _ = pair
    monkeypatch.setattr(module, "COPY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(followers, "_end", end)
    with pytest.raises(SystemExit, match="has not copied"), followers.copying(range(1), [1], 0, lands=False):
        pass


def test_what_one_rank_cannot_write_is_not_written(pair: tuple[Followers, Link[Command]]) -> None:
    """It does not map the other device, or comes to its share when the lease is over."""
    followers, follower = pair
    region = Region(name="kv", nbytes=0, host_id="", pid=0, fd=0, host="", port=0, handles=(b"a", b"b"))
    told: list[Command] = []
    errors = iter(["no peer access", "", "", "the lease is over", ""])

    def follow() -> None:
        for error in errors:
            told.append(command := follower.receive())
            assert isinstance(command, MapKV | UnmapKV | WriteKV)
            follower.send(Done(command.number, error))
            followers._answers[0].put(followers._links[0].receive())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    with pytest.raises(ValueError, match="no peer access"), followers.mapping(region):
        raise AssertionError("mapped by some alone")
    with followers.mapping(region):  # noqa: SIM117
        with (
            pytest.raises(TransferError, match="lease"),
            followers.writing(region, range(1, 3), [1], [2], [2], 5.0),
        ):
            pass
    thread.join(5)
    assert told == [
        MapKV(1, region),
        UnmapKV(2, "kv"),
        MapKV(3, region),
        WriteKV(4, "kv", 1, 3, [1], [2], [2], 5.0),
        UnmapKV(5, "kv"),
    ]
