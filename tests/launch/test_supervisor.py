import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program import until

from epd_serve.launch.processes import supervisor
from epd_serve.launch.processes.process import ProcessDied, ProcessSpec, ProcessState, RunningProcess, log_tail
from epd_serve.launch.processes.supervisor import Backoff, Process, Supervisor


class Watched(Supervisor):
    """Each change of state as "name state", and each death with the wait before the next start."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.seen: list[str] = []
        self.deaths: list[ProcessDied] = []
        self.delays_s: list[float] = []

    def on_change(self, process: Process) -> None:
        self.seen.append(f"{process.spec.name} {process.state}")

    def on_death(self, death: ProcessDied, delay_s: float) -> None:
        self.deaths.append(death)
        self.delays_s.append(delay_s)

    def at(self, event: str) -> int:
        return self.seen.index(event)


Start = Callable[..., Any]


@pytest.fixture
def start(fakes: Any, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def start(*specs: ProcessSpec, ready: bool = True, **more: Any) -> AsyncIterator[Watched]:
        """Supervise processes, which are ready unless ``ready`` is False; none is left behind."""
        running = Watched(specs, tmp_path, **{"backoff": Backoff(first_s=0.05, limit_s=0.05)} | more)
        try:
            await running.start()
            if ready:
                await running.wait_ready(300)
            yield running
        finally:
            await running.stop()
        await until(lambda: not fakes.alive)

    return start


async def test_processes_become_ready_and_end_in_turns(
    fakes: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(supervisor.GRACES_S.values()) < 10
    monkeypatch.setitem(supervisor.GRACES_S, "then", 0.5)
    specs = [
        fakes.spec("master", stops="last"),
        fakes.spec("e0", "parent"),
        fakes.spec("d0", "deaf"),
        fakes.spec("p0", "loading"),
        fakes.spec("gateway", stops="first"),
    ]
    async with start(*specs) as running:
        assert fakes.alive == {"master", "e0", "d0", "p0", "gateway", "child"}
        assert [one.state for one in running.processes] == [ProcessState.READY] * 5
    assert [one.state for one in running.processes] == [ProcessState.STOPPED] * 5
    assert running.at("p0 loading") < running.at("p0 ready")
    assert running.at("gateway stopped") < min(running.at("e0 stopping"), running.at("p0 stopping"))
    assert running.at("master stopping") > max(running.at("e0 stopped"), running.at("p0 stopped"))
    await running.stop()  # once more


def on_device(spec: ProcessSpec, *devices: str) -> ProcessSpec:
    return replace(spec, measures=frozenset(devices))


async def test_processes_that_measure_one_device_start_in_turn(fakes: Any, start: Start) -> None:
    specs = [
        on_device(fakes.spec("p0", "loading"), "cuda:0"),
        on_device(fakes.spec("d0", "loading"), "cuda:0", "cuda:1"),
        on_device(fakes.spec("e0", "loading"), "cuda:1"),
        on_device(fakes.spec("p1", "loading"), "cuda:2"),
    ]
    async with start(*specs) as running:
        assert fakes.alive == {"p0", "d0", "e0", "p1"}
        at, count = running.at, len(running.seen)
        assert at("p0 ready") < at("d0 starting") < at("d0 ready") < at("e0 starting")
        assert at("p1 starting") < at("p0 ready")
        for name in ("p0", "d0"):  # as after a fault of their GPU
            os.kill(fakes.pids[name], signal.SIGKILL)
        both = [running.process(name) for name in ("p0", "d0")]
        await until(lambda: all(one.num_restarts == 1 and one.ready.is_set() for one in both))
        again = [one for one in running.seen[count:] if one.endswith(("starting", "ready"))]
        assert [one.split()[1] for one in again] == ["starting", "ready"] * 2


@pytest.mark.parametrize(
    ("behaviour", "failure", "timeout_s"), [("never", TimeoutError, 1.0), ("die", ProcessDied, 300.0)]
)
async def test_the_start_fails_with_one_process_and_those_behind_it_never_start(
    behaviour: str, failure: type[Exception], timeout_s: float, fakes: Any, start: Start
) -> None:
    specs = [on_device(fakes.spec(name, how), "npu:0") for name, how in (("p0", behaviour), ("d0", ""))]
    async with start(fakes.spec("e0"), *specs, ready=False) as running:
        with pytest.raises(failure, match="p0") as caught:
            await running.wait_ready(timeout_s)
    assert "d0" not in fakes.pids
    if isinstance(caught.value, ProcessDied):
        assert (caught.value.name, caught.value.how) == ("p0", "exit code 3")
        assert (len(caught.value.log_tail), caught.value.log_tail[-1]) == (20, "no memory for the tower")


def test_the_log_is_shown_up_to_the_root_cause(tmp_path: Path) -> None:
    first = ["(EngineCore) Traceback (most recent call last):", "(EngineCore) ValueError: No memory for the cache"]
    then = ["Traceback:"] * 30 + ["RuntimeError: Engine core initialization failed. See root cause above."]
    (tmp_path / "d0.log").write_text("\n".join(["loading", *first, *then]))
    assert log_tail(tmp_path / "d0.log") == ["loading", *first]


async def test_a_death_is_for_good_where_nothing_is_restarted(fakes: Any, start: Start) -> None:
    async with start(fakes.spec("e0"), fakes.spec("d0"), restart=False) as running:
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        death = await asyncio.wait_for(running.wait_failure(), 300)
        assert (death.name, death.how) == ("d0", "killed by SIGKILL") and fakes.alive == {"e0"}


async def test_what_was_ready_and_dies_is_started_again_while_the_others_go_on(
    fakes: Any, start: Start, tmp_path: Path
) -> None:
    specs = [fakes.spec("e0"), fakes.spec("d0", "parent"), fakes.spec("p0", "clean")]
    async with start(*specs, fakes.spec("gateway", stops="first"), backoff=Backoff(first_s=0.2)) as running:
        before, failing = dict(fakes.pids), asyncio.create_task(running.wait_failure())
        d0 = running.process("d0")
        for num_killed in (1, 2):
            os.kill(d0.pid, signal.SIGKILL)
            await until(lambda num_killed=num_killed: d0.num_restarts == num_killed and d0.ready.is_set())
        for name in ("gateway", "p0"):  # an end of its own accord is one, too
            os.kill(fakes.pids[name], signal.SIGTERM)
            await until(lambda name=name: running.process(name).num_restarts == 1)
        await running.wait_ready(300)
        assert fakes.pids["e0"] == before["e0"] and d0.pid == fakes.pids["d0"] != before["d0"]
        assert not failing.done()
        failing.cancel()
    ends = [death.end.split(",")[0] for death in running.deaths]
    assert ends == [*["d0 died: killed by SIGKILL"] * 2, "gateway died: killed by SIGTERM", "p0 stopped"]
    assert running.delays_s == [0.2, 0.4, 0.2, 0.2] and "d0 died" in (tmp_path / "d0.log").read_text()
    of_d0 = [line.removeprefix("d0 ") for line in running.seen if line.startswith("d0 ")]
    life = ["starting", "ready", "died", "waiting"]
    assert [one for one in of_d0 if one != "loading"] == [*life, *life, *life[:2], "stopping", "stopped"]


async def test_a_crash_loop_after_a_good_start_goes_on_ever_slower(fakes: Any, start: Start) -> None:
    specs = fakes.spec("e0"), fakes.spec("d0", "once")
    async with start(*specs, backoff=Backoff(first_s=0.05, limit_s=0.15)) as running:
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: len(running.delays_s) >= 4)
        assert "no memory for the tower" in running.deaths[-1].log_tail
        with pytest.raises(TimeoutError, match="d0"):
            await running.wait_ready(0.1)
        await until(lambda: running.process("d0").state is ProcessState.WAITING)  # it is stopped while it waits
    assert running.delays_s[:4] == [0.05, 0.1, 0.15, 0.15]


async def test_a_start_that_is_not_possible_now_is_tried_again(
    fakes: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, spawn = iter([False, True, True]), supervisor.spawn

    async def fail(spec: ProcessSpec, log_file: Path) -> RunningProcess:
        if next(failures, False):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await spawn(spec, log_file)

    monkeypatch.setattr(supervisor, "spawn", fail)
    async with start(fakes.spec("d0")) as running:
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: running.process("d0").num_restarts == 1)
        await running.wait_ready(300)
    assert [death.how for death in running.deaths[1:]] == ["[Errno 11] Resource temporarily unavailable"] * 2


async def test_a_start_that_is_called_off_leaves_no_process(
    fakes: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, spawn = asyncio.Event(), asyncio.Event(), supervisor.spawn

    async def wait(spec: ProcessSpec, log_file: Path) -> RunningProcess:
        begun.set()
        await may_end.wait()
        return await spawn(spec, log_file)

    monkeypatch.setattr(supervisor, "spawn", wait)
    async with start(fakes.spec("d0"), ready=False) as running:
        await begun.wait()
        asyncio.get_running_loop().call_later(0.2, may_end.set)
    assert running.process("d0").state is ProcessState.STOPPED
    assert running.process("d0").pid, "it was started, and ended"


async def test_what_was_ready_and_hangs_is_killed_and_started_again(fakes: Any, start: Start) -> None:
    async with start(fakes.spec("e0"), fakes.spec("d0", "parent"), hang_timeout_s=4.5) as running:
        stopped, child = fakes.pids["d0"], fakes.pids["child"]
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: running.process("d0").num_restarts == 1)
        await running.wait_ready(300)
        assert fakes.pids["d0"] != stopped and fakes.pids["child"] != child
    assert [(death.name, death.how) for death in running.deaths] == [
        ("d0", "it answered nothing for 4.5 s and was killed")
    ]


@pytest.mark.parametrize(
    ("behaviour", "failure", "timeout_s"), [("die", ProcessDied, 60), ("never", TimeoutError, 1)]
)
async def test_a_process_that_comes_later_is_like_the_others_or_leaves_no_trace(
    behaviour: str, failure: type[Exception], timeout_s: float, fakes: Any, start: Start
) -> None:
    async with start(fakes.spec("e0"), fakes.spec("gateway", stops="first")) as running:
        failed = asyncio.create_task(running.wait_failure())
        with pytest.raises(failure):
            await running.add(fakes.spec("p0", behaviour), timeout_s)
        assert [one.spec.name for one in running.processes] == ["e0", "gateway"]
        assert running.num_deaths == (failure is ProcessDied), "its log is kept"
        added = await running.add(fakes.spec("d0"), 300)
        assert [one.spec.name for one in running.processes] == ["e0", "d0", "gateway"]
        os.kill(added.pid, signal.SIGKILL)
        await until(lambda: added.num_restarts == 1 and added.ready.is_set())
        await running.remove("e0")
        await running.remove("d0")
        assert fakes.alive == {"gateway"} and not failed.done()
        failed.cancel()


async def test_another_process_takes_the_place_of_one_that_finishes_what_it_has(
    fakes: Any, start: Start, tmp_path: Path
) -> None:
    async with start(fakes.spec("gateway", "retires")) as running:
        old = running.process("gateway")
        with pytest.raises(ProcessDied):
            await running.replace(fakes.spec("gateway", "die"), 300)
        assert running.processes == (old,) and old.state is ProcessState.READY
        await running.replace(fakes.spec("gateway"), 300)
        [new] = running.processes
        assert new is not old and new.state is ProcessState.READY
        await until(lambda: old.state is ProcessState.STOPPED)
        assert "retired\n" in (tmp_path / "gateway.log").read_text()
        os.kill(new.pid, signal.SIGKILL)
        await until(lambda: new.num_restarts == 1)
