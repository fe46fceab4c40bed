import asyncio
import dataclasses
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program import until

from epd_serve.launch.processes import process, supervisor
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState
from epd_serve.launch.processes.supervisor import Backoff, Supervisor


class Recorder:
    """Remembers each change of state as "name state"."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, process: ManagedProcess) -> None:
        self.seen.append(f"{process.spec.name} {process.state}")


async def test_processes_become_ready_and_end_together_first_ones_first(fakes: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    specs = [
        fakes.spec("master", stops="last"),
        fakes.spec("e0"),
        fakes.spec("p0", "loading"),
        fakes.spec("gateway", stops="first"),
    ]
    running = Supervisor(specs, tmp_path, on_change=recorder)
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        assert fakes.alive == {"master", "e0", "p0", "gateway"}
        assert [process.state for process in running.processes] == [ProcessState.READY] * 4
        assert all(process.ready_after_s is not None for process in running.processes)
    finally:
        await running.stop()
    assert fakes.alive == set()
    assert recorder.seen[:4] == ["master starting", "e0 starting", "p0 starting", "gateway starting"]
    assert recorder.seen.index("p0 loading") < recorder.seen.index("p0 ready")
    ended = recorder.seen.index("gateway stopped")
    assert ended < recorder.seen.index("e0 stopping")
    assert ended < recorder.seen.index("p0 stopping")
    last = recorder.seen.index("master stopping")
    assert last > max(recorder.seen.index("e0 stopped"), recorder.seen.index("p0 stopped"))


def on_device(spec: ProcessSpec, *devices: str) -> ProcessSpec:
    return replace(spec, measures=frozenset(devices))


async def test_processes_that_measure_one_device_start_in_turn(fakes: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    specs = [
        on_device(fakes.spec("p0", "loading"), "cuda:0"),
        on_device(fakes.spec("d0", "loading"), "cuda:0", "cuda:1"),
        on_device(fakes.spec("e0", "loading"), "cuda:1"),
        on_device(fakes.spec("p1", "loading"), "cuda:2"),
        fakes.spec("gateway", stops="first"),
    ]
    running = Supervisor(specs, tmp_path, on_change=recorder)
    try:
        await running.start()
        assert {process.spec.name for process in running.processes} == {"p0", "p1", "gateway"}
        await running.wait_ready(timeout_s=300)
        assert [process.spec.name for process in running.processes][-1] == "gateway"
        assert fakes.alive == {"p0", "d0", "e0", "p1", "gateway"}
    finally:
        await running.stop()
    at = recorder.seen.index
    assert at("p0 ready") < at("d0 starting") < at("d0 ready") < at("e0 starting")
    assert at("p1 starting") < at("p0 ready")
    assert fakes.alive == set()


async def test_who_waits_for_its_turn_is_late_and_is_not_left_behind(fakes: Any, tmp_path: Path) -> None:
    specs = [on_device(fakes.spec(name, behaviour), "npu:0") for name, behaviour in (("p0", "never"), ("d0", ""))]
    running = Supervisor(specs, tmp_path)
    try:
        await running.start()
        with pytest.raises(TimeoutError, match="not ready after 1 s: p0, d0"):
            await running.wait_ready(timeout_s=1)
    finally:
        await running.stop()
    assert set(fakes.pids) <= {"p0"} and fakes.alive == set()


async def test_a_death_before_a_turn_ends_the_start(fakes: Any, tmp_path: Path) -> None:
    specs = [on_device(fakes.spec(name, behaviour), "npu:0") for name, behaviour in (("p0", "die"), ("d0", ""))]
    running = Supervisor(specs, tmp_path)
    try:
        await running.start()
        with pytest.raises(ProcessDied, match="p0 died: exit code 3"):
            await running.wait_ready(timeout_s=300)
    finally:
        await running.stop()
    assert set(fakes.pids) == {"p0"} and fakes.alive == set()


async def test_an_end_with_exit_code_0_is_no_death(fakes: Any, tmp_path: Path) -> None:
    ends: list[str] = []
    running = Supervisor(
        [fakes.spec("p1", "clean")], tmp_path, on_death=lambda death, delay_s: ends.append(death.end)
    )
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        os.kill(fakes.pids["p1"], signal.SIGTERM)
        await until(lambda: ends == ["p1 stopped"])
    finally:
        await running.stop()


async def test_a_death_at_the_start_says_which_how_and_why(fakes: Any, tmp_path: Path) -> None:
    running = Supervisor([fakes.spec("e0"), fakes.spec("p0", "die")], tmp_path)
    try:
        await running.start()
        with pytest.raises(ProcessDied) as caught:
            await running.wait_ready(timeout_s=300)
    finally:
        await running.stop()
    assert (caught.value.name, caught.value.how) == ("p0", "exit code 3")
    assert len(caught.value.log_tail) == 20
    assert caught.value.log_tail[-1] == "no memory for the tower"
    assert "    no memory for the tower" in str(caught.value)
    assert str(tmp_path / "p0.log") in str(caught.value)
    assert fakes.alive == set()


async def test_at_first_more_is_asked_of_a_process_than_when_it_comes_back(fakes: Any, tmp_path: Path) -> None:
    spec = dataclasses.replace(fakes.spec("gateway", "partly"), first_health="/health?role=EPD")
    running = Supervisor([spec], tmp_path, backoff=lambda: Backoff(first_s=0.05, limit_s=0.05))
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        assert running.processes[0].elapsed_s >= 0.5
        os.kill(fakes.pids["gateway"], signal.SIGKILL)
        await until(lambda: running.processes[0].num_restarts == 1)
        await running.wait_ready(timeout_s=300)
    finally:
        await running.stop()


@pytest.mark.parametrize(
    ("counted", "how"), [(3, "killed by SIGKILL"), (4, "killed by SIGKILL, as .* memory ran out")]
)
async def test_want_of_memory_is_named_where_the_kernel_counts_a_kill(
    counted: int, how: str, fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 9\noom_kill 3\n")
    monkeypatch.setattr(process, "OOM_COUNTERS", (tmp_path / "nowhere", counter))
    deaths: list[ProcessDied] = []
    running = Supervisor([fakes.spec("d0")], tmp_path, on_death=lambda death, delay_s: deaths.append(death))
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        counter.write_text(f"oom 9\noom_kill {counted}\n")
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: bool(deaths))
        assert re.fullmatch(how, deaths[0].how)
    finally:
        await running.stop()


def test_the_log_is_shown_up_to_the_root_cause(fakes: Any, tmp_path: Path) -> None:
    first = ["(EngineCore) Traceback (most recent call last):", "(EngineCore) ValueError: No memory for the cache"]
    then = ["Traceback:"] * 30 + ["RuntimeError: Engine core initialization failed. See root cause above."]
    (tmp_path / "d0.log").write_text("\n".join(["loading", *first, *then]))
    managed = ManagedProcess(fakes.spec("d0"), tmp_path / "d0.log", lambda process: None, process.spawn)
    assert managed.log_tail() == ["loading", *first]


async def test_another_process_takes_the_place_of_one_that_finishes_what_it_has(
    fakes: Any, tmp_path: Path
) -> None:
    running = Supervisor([fakes.spec("gateway", "retires")], tmp_path)
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        old = running.processes[0]
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
    finally:
        await running.stop()
    assert fakes.alive == set()


async def test_a_death_after_ready_is_reported_where_nothing_is_restarted(fakes: Any, tmp_path: Path) -> None:
    running = Supervisor([fakes.spec("e0"), fakes.spec("d0")], tmp_path, restart=False)
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        death = await asyncio.wait_for(running.wait_failure(), 300)
        assert (death.name, death.how) == ("d0", "killed by SIGKILL") and fakes.alive == {"e0"}
    finally:
        await running.stop()
    assert fakes.alive == set()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(supervisor.GRACES_S, "then", 0.5)
    running = Supervisor([fakes.spec("e0", "deaf"), fakes.spec("p0")], tmp_path)
    await running.start()
    await running.wait_ready(timeout_s=300)
    started_at = time.monotonic()
    await running.stop()
    assert time.monotonic() - started_at >= 0.5
    assert fakes.alive == set()


def test_all_graces_together_leave_room_below_ten_seconds() -> None:
    assert sum(supervisor.GRACES_S.values()) <= 9.5


async def test_kill_ends_deaf_processes_at_once(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(supervisor.GRACES_S, "then", 600)
    running = Supervisor([fakes.spec("e0", "deaf"), fakes.spec("p0", "deaf")], tmp_path)
    await running.start()
    await running.wait_ready(timeout_s=300)
    stopping = asyncio.create_task(running.stop())
    await asyncio.sleep(0.1)
    running.kill()
    await asyncio.wait_for(stopping, 300)
    assert fakes.alive == set()


async def test_children_of_a_process_end_with_it(fakes: Any, tmp_path: Path) -> None:
    running = Supervisor([fakes.spec("e0", "parent")], tmp_path)
    await running.start()
    await running.wait_ready(timeout_s=300)
    assert fakes.alive == {"e0", "child"}
    await running.stop()
    fakes.wait_until(lambda: not fakes.alive)


async def test_not_ready_in_time_names_the_late_ones(fakes: Any, tmp_path: Path) -> None:
    running = Supervisor([fakes.spec("e0"), fakes.spec("p0", "never")], tmp_path)
    try:
        await running.start()
        with pytest.raises(TimeoutError, match=r"not ready after 3 s: .*p0"):
            await running.wait_ready(timeout_s=3)
    finally:
        await running.stop()
    assert fakes.alive == set()


async def test_a_command_that_cannot_start_leaves_nothing(fakes: Any, tmp_path: Path) -> None:
    broken = replace(fakes.spec("p0"), command=("/no/such/program",))
    running = Supervisor([fakes.spec("e0"), broken], tmp_path)
    with pytest.raises(FileNotFoundError):
        await running.start()
    await running.stop()
    assert fakes.alive == set()


async def test_stop_before_ready_and_twice(fakes: Any, tmp_path: Path) -> None:
    running = Supervisor([fakes.spec("e0", "never")], tmp_path)
    await running.start()
    await running.stop()
    await running.stop()
    assert [process.state for process in running.processes] == [ProcessState.STOPPED]
    assert fakes.alive == set()


async def test_what_was_ready_and_dies_is_started_again_while_the_others_go_on(fakes: Any, tmp_path: Path) -> None:
    recorder, deaths = Recorder(), []
    running = Supervisor(
        [fakes.spec("e0"), fakes.spec("d0", "parent"), fakes.spec("gateway", stops="first")],
        tmp_path,
        backoff=lambda: Backoff(first_s=0.2),
        on_change=recorder,
        on_death=lambda death, delay_s: deaths.append((death.name, death.how[:17], delay_s)),
    )
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        before = dict(fakes.pids)
        failing = asyncio.create_task(running.wait_failure())
        for killed in (1, 2):
            pid = fakes.pids["d0"]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not running.processes[1].ready.is_set())
            await running.wait_ready(timeout_s=300)
            assert running.processes[1].num_restarts == killed
            assert running.processes[1].pid == fakes.pids["d0"] != pid
        os.kill(fakes.pids["gateway"], signal.SIGTERM)  # an end of its own accord is a death too
        await until(lambda: running.processes[2].num_restarts == 1)
        await running.wait_ready(timeout_s=300)
        assert fakes.pids["e0"] == before["e0"]
        assert not failing.done()
        failing.cancel()
    finally:
        await running.stop()
    fakes.wait_until(lambda: not fakes.alive)
    assert deaths == [
        ("d0", "killed by SIGKILL", 0.2),
        ("d0", "killed by SIGKILL", 0.4),
        ("gateway", "killed by SIGTERM", 0.2),
    ]
    of_d0 = [line.removeprefix("d0 ") for line in recorder.seen if line.startswith("d0 ")]
    life = ["starting", "ready", "died", "waiting"]
    assert [state for state in of_d0 if state != "loading"] == [
        *life,
        *life,
        "starting",
        "ready",
        "stopping",
        "stopped",
    ]


async def test_a_crash_loop_after_a_good_start_goes_on_ever_slower(fakes: Any, tmp_path: Path) -> None:
    delays: list[float] = []
    running = Supervisor(
        [fakes.spec("e0"), fakes.spec("d0", "once")],
        tmp_path,
        backoff=lambda: Backoff(first_s=0.05),
        on_death=lambda death, delay_s: delays.append(delay_s),
    )
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: len(delays) >= 4)
        assert "no memory for the tower" in running.processes[1].log_tail()
        assert "d0 died: killed by SIGKILL" in (tmp_path / "d0.log").read_text()
        with pytest.raises(TimeoutError, match=r"not ready after 0.1 s: d0"):
            await running.wait_ready(timeout_s=0.1)
    finally:
        await running.stop()
    assert delays[:4] == [0.05, 0.1, 0.2, 0.4]
    assert fakes.alive == set()


async def test_stop_while_one_waits_to_be_started_again(fakes: Any, tmp_path: Path) -> None:
    waiting = asyncio.Event()
    running = Supervisor(
        [fakes.spec("e0"), fakes.spec("d0")],
        tmp_path,
        backoff=lambda: Backoff(first_s=60, limit_s=60),
        on_death=lambda death, delay_s: waiting.set(),
    )
    await running.start()
    await running.wait_ready(timeout_s=300)
    os.kill(fakes.pids["d0"], signal.SIGKILL)
    await asyncio.wait_for(waiting.wait(), 300)
    assert running.processes[1].state is ProcessState.WAITING
    await running.stop()
    assert [process.state for process in running.processes] == [ProcessState.STOPPED] * 2
    assert fakes.alive == set()


async def test_a_start_that_is_not_possible_now_is_tried_again(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []
    running = Supervisor(
        [fakes.spec("d0")],
        tmp_path,
        backoff=lambda: Backoff(first_s=0.05),
        on_death=lambda death, delay_s: deaths.append(death.how),
    )
    program = ManagedProcess.restart
    failures = iter([True, True, False])

    async def restart(process: ManagedProcess) -> None:
        if next(failures):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        await program(process)

    monkeypatch.setattr(ManagedProcess, "restart", restart)
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: running.processes[0].num_restarts == 1)
        await running.wait_ready(timeout_s=300)
    finally:
        await running.stop()
    assert len(deaths) == 3
    assert deaths[1] == deaths[2] == "[Errno 11] Resource temporarily unavailable"


async def test_what_was_ready_and_hangs_is_killed_and_started_again(fakes: Any, tmp_path: Path) -> None:
    deaths: list[str] = []
    running = Supervisor(
        [fakes.spec("e0"), fakes.spec("d0", "parent")],
        tmp_path,
        hang_timeout_s=4.5,
        backoff=lambda: Backoff(first_s=0.05),
        on_death=lambda death, delay_s: deaths.append(f"{death.name}: {death.how}"),
    )
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        stopped, child = fakes.pids["d0"], fakes.pids["child"]
        os.kill(stopped, signal.SIGSTOP)
        stopped_at = time.monotonic()
        await until(lambda: bool(deaths))
        assert time.monotonic() - stopped_at > 2.7, "three probes, of which the first may have been under way"
        await until(lambda: running.processes[1].num_restarts == 1)
        await running.wait_ready(timeout_s=300)
        assert fakes.pids["d0"] != stopped
        assert fakes.pids["child"] != child
        os.kill(fakes.pids["d0"], signal.SIGKILL)
        await until(lambda: running.processes[1].num_restarts == 2)
        await running.wait_ready(timeout_s=300)
    finally:
        await running.stop()
    hung, killed = deaths
    assert hung == "d0: it answered nothing for 4.5 s and was killed"
    assert killed.startswith("d0: killed by SIGKILL"), "of another life"
    fakes.wait_until(lambda: not fakes.alive)


async def test_a_pause_and_an_error_are_no_hang(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway without instances answers 503, and a process may be suspended for a moment."""
    deaths: list[str] = []
    asked: set[tuple[str, bool]] = set()
    ask = ManagedProcess._ask

    async def remembered(process: ManagedProcess, timeout_s: float) -> int | None:
        status = await ask(process, timeout_s)
        asked.add((process.spec.name, bool(status)))
        return status

    monkeypatch.setattr(ManagedProcess, "_ask", remembered)
    running = Supervisor(
        [fakes.spec("e0"), fakes.spec("gateway", "ails")],
        tmp_path,
        hang_timeout_s=4.5,
        on_death=lambda death, delay_s: deaths.append(f"{death.name}: {death.how}"),
    )
    try:
        await running.start()
        await running.wait_ready(timeout_s=300)
        for _ in range(3):
            asked.clear()
            os.kill(fakes.pids["e0"], signal.SIGSTOP)
            await until(lambda: ("e0", False) in asked)
            asked.clear()
            os.kill(fakes.pids["e0"], signal.SIGCONT)
            await until(lambda: ("e0", True) in asked)
    finally:
        await running.stop()
    assert deaths == []
