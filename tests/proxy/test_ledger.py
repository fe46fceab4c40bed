"""Keys whose limits several workers share."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.config.keys import hash_key
from epd_serve.errors import Overloaded
from proxy.admission import ledger as ledger_module
from proxy.admission.control import AdmissionControl
from proxy.admission.keys import Authenticator, Client, KeyLimits
from proxy.admission.ledger import Ledger
from proxy.admission.queue import AdmissionQueue
from proxy.settings import Current, GatewaySettings

LIMITS = KeyLimits(requests_per_s=2.0, burst=3, tokens_per_min=600.0, max_concurrent=4)


def of_workers(count: int) -> tuple[Ledger, list[Ledger]]:
    descriptor, parent = Ledger.create(count)
    return parent, [Ledger(descriptor, count, index) for index in range(count)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["enter", "leave", "charge", "refund", "widen"]),
            st.floats(0, 2),
            st.integers(0, 400),
        ),
        max_size=40,
    )
)
def test_three_workers_allow_what_one_process_would(steps):
    _, ledgers = of_workers(3)
    shared = [one.client("k", "sha256:0", LIMITS) for one in ledgers]
    alone, now_s = Client("k", LIMITS), 100.0
    for worker, what, later_s, tokens in steps:
        now_s += later_s
        if what in ("leave", "widen") and not shared[worker].num_active:
            continue
        outcomes = []
        for client in (shared[worker], alone):
            try:
                if what == "widen":
                    client.widen(1 + tokens % 4)
                elif what in ("enter", "charge"):
                    client.enter(now_s) if what == "enter" else client.charge(tokens, now_s)
                else:
                    client.leave() if what == "leave" else client.refund(tokens)
                outcomes.append(None)
            except Overloaded as error:
                outcomes.append((error.message, error.retry_after_s))
        assert outcomes[0] == outcomes[1]
        assert shared[worker].num_tokens_left(now_s) == pytest.approx(alone.num_tokens_left(now_s))
    assert {client.num_everywhere() for client in shared} == {alone.num_active}


def test_a_worker_that_dies_gives_back_what_it_held():
    parent, ledgers = of_workers(2)
    first, second = (one.client("k", "sha256:0", LIMITS) for one in ledgers)
    for client in (first, first, second):
        client.enter(100.0)
    parent.forget(0)
    assert second.num_everywhere() == 1


def test_other_limits_begin_anew_and_keys_without_shared_limits_need_no_account(monkeypatch):
    _, (one, other) = of_workers(2)
    one.client("k", "sha256:0", LIMITS).enter(100.0)
    changed = other.client("k", "sha256:0", KeyLimits(max_concurrent=9))
    assert changed.num_everywhere() == 0
    assert type(one.client("k", "sha256:1", KeyLimits(highest_priority=3))) is Client
    monkeypatch.setattr(ledger_module, "CAPACITY", 2)
    one.client("k", "sha256:0", LIMITS)
    with pytest.raises(ValueError, match="start the gateway again"):
        one.client("k", "sha256:2", LIMITS)


@contextmanager
def beside(work: str, descriptor: int) -> Iterator[socket.socket]:
    """Another process does ``work`` (below) as worker 0 meanwhile; yields a socket to it. Locks are those of each
    process."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            passed = (descriptor, theirs.fileno())
            command = [sys.executable, "-P", __file__, work, *map(str, passed)]
            process = subprocess.Popen(command, pass_fds=passed)
        try:
            yield ours
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()


def count_up(descriptor: int, index: int, sock: socket.socket) -> Client:
    client = Ledger(descriptor, 2, index).client("k", "sha256:0", KeyLimits(tokens_per_min=1e9))
    meet(sock)
    for _ in range(500):
        client.enter(100.0)
        client.charge(1.0, 100.0)
        client.leave()
    return client


def test_processes_that_count_at_once_lose_nothing():
    descriptor, _ = Ledger.create(2)
    with beside("count_up", descriptor) as sock:
        here = count_up(descriptor, 1, sock)
    assert here.num_tokens_left(100.0) == 1e9 - 1000
    assert here.num_everywhere() == 0


def wait_for_both(descriptor: int, index: int, sock: socket.socket) -> None:
    """Worker 0 writes its log and wants the account that worker 1 has, which wants to write."""
    ledger, failures = Ledger(descriptor, 2, index), []
    held, wanted = (ledger.writing, ledger.locked) if index == 0 else (ledger.locked, ledger.writing)
    arguments = ((), (0,)) if index == 0 else ((0,), ())

    def want() -> None:
        try:
            with wanted(*arguments[1]):
                pass
        except OSError as error:
            failures.append(error)

    waiting = threading.Thread(target=want)
    with held(*arguments[0]):
        meet(sock)
        waiting.start()
        until_both_wait(descriptor, failures)
        meet(sock)
    waiting.join()
    assert not failures


def meet(sock: socket.socket) -> None:
    sock.sendall(b".")
    assert sock.recv(1)


def until_both_wait(descriptor: int, failures: list[OSError]) -> None:
    """Or the kernel has refused one of them; for a moment only where it shows nobody's locks."""
    inode, began_s = os.fstat(descriptor).st_ino, time.monotonic()
    while not failures:
        lines = [line for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
        waiting_s = time.monotonic() - began_s
        if sum("->" in line for line in lines) == 2 or waiting_s > (60 if lines else 0.2):
            break
        time.sleep(0.005)


def test_a_log_that_is_waited_for_and_an_account_that_is_waited_for_are_no_deadlock():
    descriptor, _ = Ledger.create(2)
    with beside("wait_for_both", descriptor) as sock:
        wait_for_both(descriptor, 1, sock)


def test_one_thread_writes_at_a_time():
    descriptor, _ = Ledger.create(2)
    ledgers = [Ledger(descriptor, 2, index) for index in (0, 1)]
    inside = []

    def write(ledger: Ledger) -> None:
        for _ in range(200):
            with ledger.writing():
                inside.append(ledger)
                assert len(inside) == 1
                inside.clear()

    threads = [threading.Thread(target=write, args=(ledger,)) for ledger in ledgers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside


async def test_a_request_whose_key_cannot_be_counted_gives_back_its_place():
    descriptor, _ = Ledger.create(1)
    client = Ledger(descriptor, 1, 0).client("k", hash_key("secret"), LIMITS)
    queue = AdmissionQueue(1, 4)
    admission = AdmissionControl(
        Authenticator([(hash_key("secret"), client)]), queue, settings=Current(GatewaySettings())
    )
    first, second = admission.enter("Bearer secret"), admission.enter("Bearer secret")
    assert first.admit() is None
    turn = second.admit()
    os.close(descriptor)
    with pytest.raises(OSError, match="file descriptor"):
        first.leave()
    assert turn is not None
    await asyncio.wait_for(turn, 300)
    with pytest.raises(OSError, match="file descriptor"):
        second.leave()
    assert (queue.num_in_flight, queue.num_waiting) == (0, 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[3])) as passed:
        {"count_up": count_up, "wait_for_both": wait_for_both}[sys.argv[1]](int(sys.argv[2]), 0, passed)
