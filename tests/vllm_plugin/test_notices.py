"""The port of notices stays open to who means well, whatever others send to it."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fleet import wait_until

from epd_serve.protocol.engine_notices import LENGTH, MAX_NBYTES, AnyNotice, FeatureWithdrawn, pack
from epd_serve.vllm_plugin import notices
from epd_serve.vllm_plugin.notices import Conversation, NoticeRefused, NoticeServer

NOTICE = FeatureWithdrawn(request_id="r", mm_hash="a")


class Served:
    """A server whose handler waits for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.server = NoticeServer("127.0.0.1", 0, self._handle)
        self.strangers: list[socket.socket] = []

    def _handle(self, notice: AnyNotice, has_left: Callable[[], bool]) -> str:
        return "" if self.go.wait(60) else "nobody said go"

    def stranger(self, data: bytes = b"") -> socket.socket:
        self.strangers.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=60))
        self.strangers[-1].sendall(data)
        return self.strangers[-1]

    def ask(self) -> None:
        Conversation(f"127.0.0.1:{self.server.port}").ask(NOTICE, 60)

    def close(self) -> None:
        self.go.set()
        self.server.close()
        for one in self.strangers:
            one.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def num_threads() -> int:
    return sum(thread.name == "notice" for thread in threading.enumerate())


def test_silent_connections_make_room_and_do_not_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "READ_S", 3.0)
    silent = [served.stranger(LENGTH.pack(1000)[: number % 4]) for number in range(600)]
    served.ask()
    wait_until(lambda: num_threads() <= notices.MAX_READ, "the older ones are turned away")
    assert all(is_over(one) for one in silent)


def test_a_notice_comes_in_time_or_not_at_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "READ_S", 0.5)
    slow, started = served.stranger(LENGTH.pack(1000)), time.monotonic()
    with pytest.raises(ConnectionError):
        for _ in range(400):  # a byte at a time, each in time
            slow.send(b"x")
            time.sleep(0.1)
    assert time.monotonic() - started < 30
    assert is_over(served.stranger(LENGTH.pack(MAX_NBYTES + 1)))
    served.ask()


def test_notices_at_once_are_bounded_and_others_hear_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "MAX_HANDLED", 3)
    served.go.clear()
    for _ in range(3):
        served.stranger(pack(NOTICE))
    wait_until(lambda: served.server._num_handled == 3, "three are handled")
    with pytest.raises(NoticeRefused, match="3 notices are being handled"):
        served.ask()
    served.go.set()
    wait_until(lambda: served.server._num_handled == 0, "they are answered")
    served.ask()


def test_it_serves_on_after_descriptors_have_run_out(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            waiting.connect(("127.0.0.1", served.server.port))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        served.ask()
