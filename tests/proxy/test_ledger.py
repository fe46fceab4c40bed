"""Keys whose limits several workers share."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import Overloaded
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
