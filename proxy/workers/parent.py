"""The parent of a gateway's workers: starts them, starts those again that die, and passes on what concerns all."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from epd_serve.config import DeploymentConfig
from epd_serve.rpc.link import LinkClosed
from epd_serve.telemetry.metrics import Family, cumulative, exposition, merge
from proxy.admission.ledger import Ledger
from proxy.http.server import ready_text
from proxy.observe.metrics import GROWING_GAUGES, SUMMED_GAUGES
from proxy.workers.channel import CallFailed, Channel
from proxy.workers.crew import ANSWER_S, Asked, Change, Shared, TakenOver
from proxy.workers.sockets import Listeners, admin_socket
from proxy.workers.worker_setup import WorkerSetup

logger = logging.getLogger(__name__)

#: As in epd_serve.launch: a user's directory is no place to import "device" or "proxy" from.
_PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")
#: Between two starts of a worker that does not live for long; it doubles up to the second.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_LIVES_S = 10.0
#: For a worker to come to serve; programs that are loaded from a cold disk by a busy machine take long.
_START_S = 120.0
#: So many pings in a row go unanswered: a machine that was suspended misses one.
_NUM_PINGS = 3
#: Beyond what a worker gives its requests at the end.
_END_S = 5.0


def run_workers(config: DeploymentConfig, host: str, port: int, arguments: Sequence[str], *, reloads: bool) -> int:
    """Run ``config.gateway.workers`` processes on one port until SIGTERM or SIGINT; the exit code.

    ``arguments`` are those of this program, with which the workers are started, too; ``reloads``: whether there is
    a file that SIGHUP has them read again. Raises ValueError where an address cannot be listened on.
    """
    with ExitStack() as held:
        listeners = Listeners(host, port, config.gateway.workers)
        held.callback(listeners.close)
        admin = None
        if config.gateway.admin.port is not None:
            admin = held.enter_context(admin_socket(config.gateway.admin.host, config.gateway.admin.port))
        return asyncio.run(_Parent(config, listeners, admin, arguments, reloads=reloads).run())


@dataclass(slots=True, eq=False)
class _Worker:
    """One life of a worker."""

    process: asyncio.subprocess.Process
    channel: Channel
    serving: asyncio.Task[None]
    joined: asyncio.Event
    started_s: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        if self.process.returncode is None:
            # Popen.kill would reap a process that has just ended, and lose its exit code
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        code = await self.process.wait()
        await asyncio.wait({self.serving}, timeout=_END_S)
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        return code


class _Parent:
    def __init__(
        self,
        config: DeploymentConfig,
        listeners: Listeners,
        admin: socket.socket | None,
        arguments: Sequence[str],
        *,
        reloads: bool,
    ) -> None:
        gateway = config.gateway
        self._count = gateway.workers
        self._listeners = listeners
        self._admin = admin
        self._arguments = arguments
        self._reloads = reloads
        self._hang_timeout_s = config.hang_timeout_s
        self._start_s = None if config.hang_timeout_s is None else max(_START_S, config.hang_timeout_s)
        self._end_s = gateway.shutdown_delay_s + gateway.shutdown_grace_s + _END_S
        self._config = os.memfd_create("epd-serve-deployment")
        os.write(self._config, config.model_dump_json(exclude_unset=True).encode())
        self._ledger_descriptor, self._ledger = Ledger.create(self._count)
        self._hub = Hub()
        self._workers: dict[int, _Worker] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Until all workers have ended; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if self._reloads:
            loop.add_signal_handler(signal.SIGHUP, self._hub.tell, "reload")
        try:
            leader = await self._start(0)
            if not await self._has_joined(leader):  # what it lacks the others lack: it is said once
                leader.kill()
                code = await leader.wait()
                return 0 if self._stopping.is_set() else abs(code) or 1
            print(ready_text(self._listeners.host, self._listeners.port), flush=True)
            async with asyncio.TaskGroup() as keeping:
                for index in range(self._count):
                    keeping.create_task(self._keep(index, leader if index == 0 else None))
        finally:
            for worker in self._workers.values():
                worker.kill()
        return 0

    def _stop(self) -> None:
        """The first time gracefully, then at once."""
        self._hub.tell("end" if self._stopping.is_set() else "stop")
        self._stopping.set()
        self._listeners.close()  # of those that still listen the workers have their own

    async def _keep(self, index: int, worker: _Worker | None) -> None:
        """Have worker ``index`` run until the end."""
        delay_s = _FIRST_DELAY_S
        while worker is not None or not self._stopping.is_set():  # one that has joined ends as all do
            try:
                worker = worker or await self._start(index)
            except OSError as error:  # no memory for a process, say: that passes
                logger.error("worker %d of the gateway cannot be started: %s", index, error)
            else:
                await self._live(index, worker)
                if self._stopping.is_set():
                    return
                lived = worker.joined.is_set() and time.monotonic() - worker.started_s > _LIVES_S
                delay_s = _FIRST_DELAY_S if lived else min(2 * delay_s, _LONGEST_DELAY_S)
                logger.error(
                    "worker %d of the gateway %s; it is started again in %g s",
                    index,
                    _how(worker.process.returncode),
                    delay_s,
                )
                if not worker.joined.is_set():
                    with suppress(OSError):
                        self._listeners.replace(index)
            worker = None
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _live(self, index: int, worker: _Worker) -> None:
        """Until the worker has ended, of itself or because this gateway ends."""
        ending = asyncio.create_task(worker.wait())
        watching = asyncio.create_task(self._watch(index, worker))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                if worker.joined.is_set():
                    worker.channel.tell("stop")  # it may have joined a moment ago
                else:
                    worker.kill()
                await asyncio.wait({ending}, timeout=self._end_s)
        finally:
            for task in (watching, stopping):
                task.cancel()
            worker.kill()
            await asyncio.gather(ending, watching, stopping, return_exceptions=True)
            self._workers.pop(index, None)
            self._hub.left(index)
            self._ledger.forget(index)

    async def _watch(self, index: int, worker: _Worker) -> None:
        """Kill a worker that stands still."""
        if self._hang_timeout_s is None:
            return
        try:
            async with asyncio.timeout(self._start_s):
                await worker.joined.wait()
        except TimeoutError:
            self._comes_too_late(index, worker)
            return
        num_missed = 0
        while num_missed < _NUM_PINGS:
            interval_s = self._hang_timeout_s / _NUM_PINGS
            try:
                await worker.channel.call("ping", timeout_s=interval_s)
            except TimeoutError:
                num_missed += 1
            except LinkClosed:
                return
            else:
                num_missed = 0
                await asyncio.sleep(interval_s)
        logger.error("worker %d of the gateway answered nothing for %g s", index, self._hang_timeout_s)
        worker.kill()

    def _comes_too_late(self, index: int, worker: _Worker) -> None:
        logger.error("worker %d of the gateway did not come to serve within %g s", index, self._start_s)
        worker.kill()

    async def _has_joined(self, worker: _Worker) -> bool:
        """Whether the worker has come to serve, and not to its end."""
        either = {asyncio.create_task(worker.joined.wait()), asyncio.create_task(worker.process.wait())}
        either.add(asyncio.create_task(self._stopping.wait()))
        try:
            done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=self._start_s)
            if not done:
                self._comes_too_late(0, worker)
        finally:
            for task in either:
                task.cancel()
            await asyncio.gather(*either, return_exceptions=True)
        return worker.joined.is_set()

    async def _start(self, index: int) -> _Worker:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            setup = WorkerSetup(
                index=index,
                count=self._count,
                config=self._config,
                channel=theirs.fileno(),
                ledger=self._ledger_descriptor,
                listeners=self._listeners.of(index),
                admin=self._admin.fileno() if self._admin is not None and index == 0 else None,
            )
            tied = ("--parent-pid", str(os.getpid()), "--worker", str(setup))
            try:
                process = await asyncio.create_subprocess_exec(
                    *_PROGRAM, *self._arguments, *tied, pass_fds=setup.descriptors
                )
            except OSError:
                ours.close()
                raise
        joined = asyncio.Event()
        channel = self._hub.connect(index, joined)
        await channel.open(ours)
        serving = asyncio.create_task(channel.run())
        worker = self._workers[index] = _Worker(process, channel, serving, joined)
        return worker


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class Hub:
    """Knows the workers that have joined by their channels.

    Attributes:
        shared: what those that join must know.
    """

    def __init__(self) -> None:
        self.shared = Shared()
        self._channels: dict[int, Channel] = {}
        self._had_joined: set[int] = set()
        self._counted: dict[int, list[Family]] = {}
        self._retired: list[Family] = []

    def connect(self, index: int, joined: asyncio.Event) -> Channel:
        """The parent's side of the channel to worker ``index``, not yet open; ``joined`` is set when it serves."""

        async def join(_: bytes) -> bytes:
            self.shared.expire(time.monotonic())
            known = msgspec.structs.replace(self.shared, again=index in self._had_joined)
            self._had_joined.add(index)
            self._channels[index] = channel
            joined.set()
            return msgspec.msgpack.encode(known)

        channel = Channel(
            {
                "join": join,
                "share": partial(self._share, index),
                "ask": partial(self._ask, index),
                "metrics": self._metrics,
            }
        )
        return channel

    def left(self, index: int) -> None:
        """The worker has ended. What it had counted when it was last asked stays in the sums, so that no counter
        that anybody has seen ever falls."""
        self._channels.pop(index, None)
        if (counted := self._counted.pop(index, None)) is not None:
            self._retired = merge([self._retired, cumulative(counted, GROWING_GAUGES)], GROWING_GAUGES)

    def tell(self, name: str) -> None:
        """All of them."""
        for channel in self._channels.values():
            channel.tell(name)

    async def _share(self, index: int, body: bytes) -> bytes:
        change = msgspec.msgpack.decode(body, type=Change)
        self.shared.apply(change, time.monotonic())
        unconfirmed: list[int] = []
        if not isinstance(change, TakenOver):
            _, unconfirmed = await self._call_all("change", change, but=index)
        return msgspec.msgpack.encode(unconfirmed)

    async def _ask(self, index: int, body: bytes) -> bytes:
        answers, silent = await self._call_all("show", msgspec.msgpack.decode(body), but=index)
        return msgspec.msgpack.encode(Asked(list(answers.values()), silent))

    async def _metrics(self, _: bytes) -> bytes:
        answers, _silent = await self._call_all("show", "metrics")
        for index, answer in answers.items():
            if index in self._channels:  # it may have ended since
                self._counted[index] = msgspec.msgpack.decode(answer, type=list[Family])
        families = merge([self._retired, *self._counted.values()], SUMMED_GAUGES)
        return msgspec.msgpack.encode(exposition(families))

    async def _call_all(
        self, name: str, argument: Any, *, but: int | None = None
    ) -> tuple[dict[int, bytes], list[int]]:
        """The answers by worker, of those that answer in time, and which others live on without."""
        asked = {index: channel for index, channel in self._channels.items() if index != but}
        answers: dict[int, bytes] = {}

        async def call(index: int, channel: Channel) -> None:
            with suppress(LinkClosed, CallFailed, TimeoutError):
                answers[index] = await channel.call(name, argument, timeout_s=ANSWER_S)

        async with asyncio.TaskGroup() as calling:
            for index, channel in asked.items():
                calling.create_task(call(index, channel))
        silent = [
            index
            for index, channel in asked.items()
            if index not in answers and self._channels.get(index) is channel  # the next one knows what is shared
        ]
        return answers, silent
