"""The leader's books of what its followers still owe it."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from epd_serve.worker.commands import Channel, Done, Stage, decode_answer, decode_command
from epd_serve.worker.followers import Followers


def test_a_failed_staging_leaves_no_answer_for_the_next() -> None:
    """A leftover would let the next staging return before the other ranks are done with it."""
    ours, theirs = socket.socketpair()
    followers = Followers.__new__(Followers)
    followers._channels = [Channel(ours)]
    followers._answers = [queue.SimpleQueue()]
    followers._staging = threading.Lock()
    follower = Channel(theirs)

    def follow() -> None:
        for _ in range(2):
            assert isinstance(decode_command(follower.receive()), Stage)
            follower.send(Done())
            followers._answers[0].put(decode_answer(followers._channels[0].receive()))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    with pytest.raises(MemoryError), followers.staging(Stage(0, 1, [1])):
        raise MemoryError
    assert followers._answers[0].empty()
    with followers.staging(Stage(0, 1, [1])):
        pass
    thread.join(5)
    assert followers._answers[0].empty()
    ours.close()
    theirs.close()
