"""Keys whose limits several workers share."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.config.keys import hash_key
from epd_serve.errors import Overloaded
from proxy.admission import AdmissionQueue
from proxy.auth import Authenticator
from proxy.gate import Gate
from proxy.limits import Client, KeyLimits
from proxy.workers import ledger as ledger_module
from proxy.workers.ledger import Ledger

LIMITS = KeyLimits(requests_per_s=2.0, burst=3, tokens_per_min=600.0, max_concurrent=4)


def of_workers(count: int) -> tuple[Ledger, list[Ledger]]:
    descriptor, parent = Ledger.create(count)
    return parent, [Ledger(descriptor, count, index) for index in range(count)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["enter", "leave", "charge", "refund"]),
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
        if what == "leave" and not shared[worker].num_active:
            continue
        outcomes = []
        for client in (shared[worker], alone):
            try:
                if what in ("enter", "charge"):
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


def count_up(descriptor: int, index: int, rounds: int) -> None:
    client = Ledger(descriptor, 2, index).client("k", "sha256:0", KeyLimits(tokens_per_min=1e9))
    for _ in range(rounds):
        client.enter(100.0)
        client.charge(1.0, 100.0)
        client.leave()


def test_processes_that_count_at_once_lose_nothing():
    descriptor, _ = Ledger.create(2)
    here = Ledger(descriptor, 2, 1).client("k", "sha256:0", KeyLimits(tokens_per_min=1e9))
    pid = os.fork()  # the descriptor is inherited, and locks are those of each process
    if not pid:
        try:
            count_up(descriptor, 0, 500)
        finally:
            os._exit(0)
    for _ in range(500):
        here.charge(1.0, 100.0)
    assert os.waitpid(pid, 0)[1] == 0
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
        for _ in range(40):  # until both wait, where the kernel shows that
            if failures or is_waited_for(descriptor, 2):
                break
            time.sleep(0.005)
        meet(sock)
    waiting.join()
    assert not failures


def meet(sock: socket.socket) -> None:
    sock.sendall(b".")
    assert sock.recv(1)


def is_waited_for(descriptor: int, waiters: int) -> bool:
    inode = os.fstat(descriptor).st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return sum("->" in line and f":{inode} " in line for line in lines) == waiters


def test_a_log_that_is_waited_for_and_an_account_that_is_waited_for_are_no_deadlock():
    descriptor, _ = Ledger.create(2)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            wait_for_both(descriptor, 0, ours)
            code = 0
        finally:
            os._exit(code)
    ours.close()
    try:
        wait_for_both(descriptor, 1, theirs)
    finally:
        theirs.close()
        assert os.waitpid(pid, 0)[1] == 0


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
    gate = Gate(Authenticator([(hash_key("secret"), client)]), queue, queue_timeout_s=60)
    first, second = gate.enter("Bearer secret"), gate.enter("Bearer secret")
    assert first.admit() is None
    turn = second.admit()
    os.close(descriptor)
    with pytest.raises(OSError, match="file descriptor"):
        first.leave()
    assert turn is not None
    await asyncio.wait_for(turn, 60)
    with pytest.raises(OSError, match="file descriptor"):
        second.leave()
    assert (queue.num_in_flight, queue.num_waiting) == (0, 0)
