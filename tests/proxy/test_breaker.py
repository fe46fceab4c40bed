"""The circuit breaker as a pure state machine, and what the gateway makes of it over real sockets."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.fleet.health import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(
    num_consecutive=4, failure_rate=0.5, min_calls=10, window_s=10, open_s=1, max_open_s=8, slow_start_s=5
)


class Machine(RuleBasedStateMachine):
    """Against the plain rules: when it opened, how long it is left alone, what closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(LIMITS)
        self.now = 100.0
        self.calls: list[tuple[float, bool]] = []
        self.opened_at = 0.0
        self.open_s = LIMITS.open_s
        self.before = BreakerState.CLOSED

    @rule(seconds=st.sampled_from((0.01, 0.5, 1.0, 3.0, 11.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(failed=st.booleans())
    def call(self, failed: bool) -> None:
        was_closed = self.breaker.state is BreakerState.CLOSED
        opened = self.breaker.record(failed, self.now)
        if not was_closed:
            assert not opened, "only what is closed can be opened by a call"
            return
        self.calls.append((self.now, failed))
        if opened:
            recent = [bad for at, bad in self.calls if self.now - at < LIMITS.window_s]
            in_a_row = all(bad for _, bad in self.calls[-LIMITS.num_consecutive :])
            assert (in_a_row and len(self.calls) >= LIMITS.num_consecutive) or sum(recent) * 2 >= len(recent) >= 10
            self._opened()
        else:
            assert not all(bad for _, bad in self.calls[-4:]) or len(self.calls) < 4

    @rule(passed=st.booleans())
    @precondition(lambda self: self.breaker.state is not BreakerState.OPEN)
    def probe(self, passed: bool) -> None:
        state = self.breaker.state
        self.breaker.probed(passed, self.now)
        if passed:
            assert self.breaker.state is BreakerState.CLOSED
            if state is BreakerState.HALF_OPEN:
                self.calls, self.open_s = [], LIMITS.open_s
                assert self.breaker.share(self.now) == pytest.approx(0.1)
        else:
            if state is BreakerState.HALF_OPEN:
                self.open_s = min(2 * self.open_s, LIMITS.max_open_s)
            self._opened()

    @rule()
    def look(self) -> None:
        was_open = self.breaker.state is BreakerState.OPEN
        due = self.breaker.may_probe(self.now)
        assert due == (not was_open or self.now >= self.opened_at + self.open_s)

    @rule()
    def restart(self) -> None:
        self.breaker.restarted()
        self.open_s = LIMITS.open_s
        assert self.breaker.state is BreakerState.HALF_OPEN

    @invariant()
    def shares_work_only_while_closed(self) -> None:
        share = self.breaker.share(self.now)
        assert (share > 0) == (self.breaker.state is BreakerState.CLOSED)
        assert share == 0 or 0.1 <= share <= 1

    def _opened(self) -> None:
        assert self.breaker.state is BreakerState.OPEN
        self.opened_at = self.now


TestBreaker = Machine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_share_grows_to_all() -> None:
    breaker = Breaker(LIMITS)
    assert breaker.share(0) == 1
    breaker.restarted()
    breaker.probed(True, 10.0)
    assert [breaker.share(at) for at in (10.0, 12.5, 15.0, 99.0)] == [0.1, 0.5, 1.0, 1.0]


def health(**more) -> dict[str, float]:
    return {"probe_interval_s": 0.1, "probe_timeout_s": 0.3, "slow_start_s": 0} | more


async def test_a_silent_instance_loses_its_requests_to_another(start, kit):
    """It answers /info and keeps its connections; only /health tells."""
    gateway = await start("a0:EPD", "a1:EPD", health=health())
    wedged = [kit.FOREVER]
    gateway["a0"].scripts |= {"/health": lambda _: wedged, "/stage/prefill": lambda _: [kit.FOREVER]}
    started = time.monotonic()
    answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(4)))
    assert answers == [(200, kit.WHOLE)] * 4
    assert time.monotonic() - started < 30, "not the request's own time limit"
    assert gateway.table["a0"].ready and not gateway.table["a0"].accepting
    del gateway["a0"].scripts["/health"], gateway["a0"].scripts["/stage/prefill"]
    await gateway.until(lambda: gateway.table["a0"].accepting)
    await gateway.settle()


async def test_a_stream_leaves_a_stopped_instance(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", health=health())
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda message: (
            [kit.FRAMES, kit.frame(2), kit.frame(0, end=True)]
            if message.generated
            else [kit.FRAMES, kit.frame(1), kit.FOREVER]
        )
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: any(gateway[name].got("/stage/prefill") for name in ("a0", "a1")))
    [stopped] = [name for name in ("a0", "a1") if gateway[name].got("/stage/prefill")]
    gateway[stopped].scripts["/health"] = lambda _: [kit.FOREVER]
    assert await asking == (200, kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE)
    await gateway.settle()


async def test_a_stream_goes_on_at_the_only_instance_when_that_computes_again(start, kit):
    """The same process: it was stopped, and nothing that failed before speaks against it."""
    gateway = await start("a0:EPD", health=health())
    gateway["a0"].scripts["/stage/prefill"] = lambda message: (
        [kit.FRAMES, kit.frame(2), kit.frame(0, end=True)]
        if message.generated
        else [kit.FRAMES, kit.frame(1), kit.FOREVER]
    )
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: gateway["a0"].got("/stage/prefill"))
    gateway["a0"].scripts["/health"] = lambda _: [kit.FOREVER]
    await gateway.until(lambda: not gateway.table["a0"].accepting)
    await gateway.until(lambda: gateway["a0"].cancelled)
    assert not asking.done()
    del gateway["a0"].scripts["/health"]
    assert await asking == (200, kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE)
    assert len(gateway["a0"].got("/stage/prefill")) == 2
    await gateway.settle()


async def test_failures_in_a_row_open_it_and_a_probe_closes_it(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", health=health(probe_interval_s=None))
    gateway["a0"].scripts["/stage/prefill"] = lambda _: kit.fail(500, "out of memory")
    gateway["a0"].scripts["/health"] = lambda _: kit.fail(500, "failing too")
    while gateway.table["a0"].accepting:
        assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert len(gateway["a0"].got("/stage/prefill")) == 5
    async with gateway.session.get(f"{gateway.url}/health") as response:
        shown = (await response.json())["instances"]
    assert {name: one["ready"] for name, one in shown.items()} == {"a0": False, "a1": True}
    for _ in range(6):
        assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    await gateway.until(lambda: gateway["a0"].num_probes >= 2)
    assert len(gateway["a0"].got("/stage/prefill")) == 5
    assert gateway["a1"].num_probes == 0
    gateway["a0"].scripts.clear()
    await gateway.until(lambda: gateway.table["a0"].accepting)


@pytest.mark.parametrize("status", [400, 402, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 431, 451])
async def test_what_a_request_causes_is_not_tried_again_and_speaks_against_nobody(start, kit, status):
    gateway = await start("p0:P", "d0:D", health=health(probe_interval_s=None, max_failures=1))
    for name, call in (("p0", "/stage/prefill"), ("d0", "/stage/decode")):
        gateway[name].scripts[call] = lambda _: kit.fail(status, "the request is wrong")
        before = len(gateway[name].got(call))
        for number in range(1, 4):
            assert (await gateway.answer(kit.chat()))[0] == (status if status in (404, 413) else 400)
            assert len(gateway[name].got(call)) == before + number
        gateway[name].scripts.clear()
        assert gateway.table["p0"].accepting and gateway.table["d0"].accepting
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_a_restarted_instance_gets_no_work_before_it_has_answered(start, kit, monkeypatch):
    """Nor is it shown as ready for a moment: whoever waits for that would be refused in the next."""
    monkeypatch.setattr("proxy.fleet.health._TICK_S", 1.0)
    gateway = await start("a0:EPD", health=health(probe_interval_s=None, probe_timeout_s=300))
    computed = asyncio.Event()
    gateway["a0"].scripts["/health"] = lambda _: [computed.wait, (204, {})]
    gateway["a0"].info["pid"] = 2
    await gateway.until(lambda: gateway.table["a0"].info.pid == 2)
    assert not gateway.table["a0"].accepting
    async with gateway.session.get(f"{gateway.url}/health") as response:
        assert not (await response.json())["instances"]["a0"]["ready"]
    computed.set()
    await gateway.until(lambda: gateway.table["a0"].accepting)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_a_restarted_instance_starts_slowly(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", health=health(slow_start_s=1000, probe_timeout_s=60))
    await gateway.until(lambda: gateway["a0"].num_probes > 0)
    gateway["a0"].info["pid"] = 2
    await gateway.until(lambda: not gateway.table["a0"].accepting or gateway.table["a0"].info.pid == 2)
    await gateway.until(lambda: gateway.table["a0"].accepting and gateway.table["a0"].info.pid == 2)
    await asyncio.sleep(0.3)
    await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(60)))
    counts = [len(gateway[name].got("/stage/prefill")) for name in ("a0", "a1")]
    assert sum(counts) == 60 and counts[0] < 25
