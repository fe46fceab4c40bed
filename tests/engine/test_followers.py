"""The leader's books of what its followers still owe it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from epd_serve.engine import followers as module
from epd_serve.engine.commands import Channel, Done, Stage, decode_answer, decode_command
from epd_serve.engine.followers import Followers


@pytest.fixture
def pair() -> Iterator[tuple[Followers, Channel]]:
    """A leader's books without its processes, and the other end of its only channel."""
    ours, theirs = socket.socketpair()
    followers = Followers.__new__(Followers)
    followers._channels = [Channel(ours)]
    followers._answers = [queue.SimpleQueue()]
    followers._staging = threading.Lock()
    followers._num_stagings = 0
    yield followers, Channel(theirs)
    ours.close()
    theirs.close()


def test_a_failed_staging_is_over_on_all_ranks_and_a_stale_answer_is_no_answer(
    pair: tuple[Followers, Channel],
) -> None:
    """Else the blocks would be another's, or unsent KV taken for staged, while a rank is still at it."""
    followers, follower = pair
    answered: list[int] = []

    def follow() -> None:
        for _ in range(2):
            command = decode_command(follower.receive())
            assert isinstance(command, Stage)
            for number in (command.number - 1, command.number):
                follower.send(Done(number))
                answered.append(number)
                followers._answers[0].put(decode_answer(followers._channels[0].receive()))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    with pytest.raises(MemoryError), followers.staging(range(1), [1]):
        raise MemoryError
    assert answered == [0, 1]
    with followers.staging(range(1), [1]):
        pass
    assert answered == [0, 1, 1, 2]
    thread.join(5)
    assert followers._answers[0].empty()


def test_a_follower_that_does_not_stage_ends_the_instance(
    pair: tuple[Followers, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(reason: str) -> NoReturn:
        raise SystemExit(reason)

    followers, _ = pair
    monkeypatch.setattr(module, "STAGING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(followers, "_end", end)
    with pytest.raises(SystemExit, match="has not staged"), followers.staging(range(1), [1]):
        pass


def test_a_channel_that_is_closed_while_a_thread_receives_ends_for_both() -> None:
    """Else a follower waits for its leader's next command until it is killed."""
    ours, theirs = map(Channel, socket.socketpair())
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive(channel: Channel, name: str) -> None:
        with pytest.raises(EOFError):
            channel.receive()
        ends.put(name)

    for channel, name in ((ours, "leader"), (theirs, "follower")):
        threading.Thread(target=receive, args=(channel, name), daemon=True).start()
    time.sleep(0.1)  # until both are in their system calls; where they are not, there is nothing to see
    ours.close()
    assert {ends.get(timeout=300) for _ in range(2)} == {"leader", "follower"}
    theirs.close()
