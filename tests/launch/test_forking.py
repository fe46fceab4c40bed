"""Processes from a fork server behave as spawned ones, and do without it when it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from program import until

from epd_serve.launch.processes.forking import ForkedProcess, ForkServer, ForkServerGone
from epd_serve.launch.processes.process import ProcessDied, ProcessSpec, RunningProcess, spawn
from epd_serve.launch.processes.supervisor import Backoff, Supervisor


def open_file(pid: int, number: int) -> str:
    return str(Path(f"/proc/{pid}/fd/{number}").readlink())


class Starter:
    """Forks where that is possible, and counts."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.num_forked = 0

    async def __call__(self, spec: ProcessSpec, log_file: Path) -> RunningProcess:
        try:
            forked = await self.server.fork(spec, log_file)
        except ForkServerGone:
            return await spawn(spec, log_file)
        assert isinstance(forked, ForkedProcess)
        self.num_forked += 1
        return forked


@asynccontextmanager
async def forking(
    spec: ProcessSpec, folder: Path, modules: Sequence[str] = ("fake_program",)
) -> AsyncIterator[ForkServer]:
    server = ForkServer(modules, spec.environment, folder / "fork-server.log")
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_a_forked_process_is_as_a_spawned_one(fakes: Any, tmp_path: Path) -> None:
    specs = [fakes.spec("e0", can_fork=True), fakes.spec("d0", "parent", can_fork=True)]
    for spec in specs:
        spec.environment["OLDPWD"] = os.fsdecode(b"/caf\xe9")  # no UTF-8
    deaths: list[str] = []
    async with forking(specs[0], tmp_path) as server:
        running = Supervisor(
            specs,
            tmp_path,
            start=(starter := Starter(server)),
            backoff=lambda: Backoff(first_s=0.1),
            on_death=lambda death, delay_s: deaths.append(f"{death.name} {death.how[:17]}"),
        )
        try:
            await running.start()
            await running.wait_ready(timeout_s=300)
            assert fakes.alive == {"e0", "d0", "child"}
            assert starter.num_forked == 2
            for process, spec in zip(running.processes, specs, strict=True):
                seen = psutil.Process(process.pid)
                shown = [word for word in seen.cmdline() if word]
                assert (shown[:-1], shown[-1]) == (list(spec.command[:-1]), str(seen.ppid()))
                assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
                files = [open_file(process.pid, number) for number in (0, 1, 2)]
                assert files == [os.devnull, *[str(process.log_file)] * 2]
            os.kill(fakes.pids["d0"], signal.SIGKILL)
            await until(lambda: bool(deaths))
            await running.wait_ready(timeout_s=300)
            assert deaths == ["d0 killed by SIGKILL"]
            assert starter.num_forked == 3
        finally:
            await running.stop()
        assert {name for name in ("e0", "d0") if name in fakes.alive} == set()
    fakes.wait_until(lambda: not fakes.alive)


async def test_a_failed_start_is_told_with_its_exit_code_and_words(fakes: Any, tmp_path: Path) -> None:
    spec = fakes.spec("p0", "die", can_fork=True)
    async with forking(spec, tmp_path) as server:
        running = Supervisor([spec], tmp_path, start=Starter(server))
        await running.start()
        with pytest.raises(ProcessDied, match=r"p0 died: exit code 3.*\n(.*\n)*    no memory for the tower"):
            await running.wait_ready(timeout_s=300)
        await running.stop()


async def test_what_is_forked_ends_with_the_server_and_is_then_spawned(fakes: Any, tmp_path: Path) -> None:
    spec = fakes.spec("e0", "deaf", can_fork=True)
    async with forking(spec, tmp_path) as server:
        starter = Starter(server)
        running = Supervisor([spec], tmp_path, start=starter, backoff=lambda: Backoff(first_s=0.1))
        try:
            await running.start()
            await running.wait_ready(timeout_s=300)
            old = psutil.Process(fakes.pids["e0"])
            server.kill()
            await until(lambda: running.processes[0].num_restarts == 1)
            await running.wait_ready(timeout_s=300)
            assert fakes.pids["e0"] != old.pid
            assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
            assert starter.num_forked == 1
        finally:
            running.kill()
            await running.stop()


async def test_nobody_waits_for_a_server_whose_reader_is_cancelled(fakes: Any, tmp_path: Path) -> None:
    spec = fakes.spec("e0", can_fork=True)
    async with forking(spec, tmp_path) as server:
        process = await server.fork(spec, tmp_path / "e0.log")
        assert server._reading is not None
        server._reading.cancel()  # what asyncio.run() does when it ends early
        assert await asyncio.wait_for(process.wait(), 300) == -signal.SIGKILL
        await until(lambda: not psutil.pid_exists(process.pid))
        with pytest.raises(ForkServerGone):
            await server.fork(spec, tmp_path / "e0.log")


async def test_a_server_with_threads_forks_nothing(fakes: Any, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    spec = fakes.spec("e0", can_fork=True)
    spec.environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    async with forking(spec, tmp_path, ["busy"]) as server:
        with pytest.raises(ForkServerGone, match="has threads"):
            await server.fork(spec, tmp_path / "e0.log")


async def test_nobody_waits_for_a_start_that_is_given_up(fakes: Any, tmp_path: Path) -> None:
    spec = fakes.spec("e0", can_fork=True)
    async with forking(spec, tmp_path) as server:
        await server.fork(fakes.spec("p0", can_fork=True), tmp_path / "p0.log")
        starting = asyncio.create_task(server.fork(spec, tmp_path / "e0.log"))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0.5)
        await until(lambda: "e0" not in fakes.alive)
    fakes.wait_until(lambda: not fakes.alive)
