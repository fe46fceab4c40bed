"""Work for several peers."""

from __future__ import annotations

import threading
import time

from epd_serve.vllm_plugin.kv_sending import Lanes


def test_each_lane_keeps_its_order_and_waits_for_no_other() -> None:
    held, done, all_done = threading.Event(), list[str](), threading.Event()

    def handle(work: str) -> None:
        if work == "a0":
            held.wait(300)
        done.append(work)
        if len(done) == 6:
            all_done.set()

    lanes = Lanes("test", handle)
    for number in range(3):
        for lane in ("a", "b"):
            lanes.put(lane, f"{lane}{number}")
    deadline = time.monotonic() + 20
    while len(done) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert done == ["b0", "b1", "b2"]
    held.set()
    assert all_done.wait(300)
    assert done[3:] == ["a0", "a1", "a2"]


def test_no_thread_stays_without_work() -> None:
    done = threading.Semaphore(0)
    lanes: Lanes[int] = Lanes("test", lambda work: done.release(), idle_s=0.01)
    for _ in range(3):  # it comes back where it had gone
        lanes.put("a", 1)
        assert done.acquire(timeout=300)
        deadline = time.monotonic() + 20
        while lanes.num_threads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
