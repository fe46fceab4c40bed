"""Starting processes from a fork server, as its user sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from epd_serve.launch.processes.fork_server import Ended, Fork, News, NotStarted, Started, Usable
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.rpc.link import AsyncLink, LinkClosed

_EXIT_GRACE_S = 1.0
#: Bytes of a command line that ps can show of a forked process.
_TITLE_BYTES = 4096
_NEWS: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


class ForkServerGone(OSError):
    """The fork server cannot be used, or no longer; processes can still be spawned."""


class ForkedProcess:
    """A process that a fork server has started: the part of ``asyncio.subprocess.Process`` that a supervisor uses.

    Attributes:
        returncode: None while it runs; negative: the signal that ended it.
    """

    __slots__ = ("_ended", "pid", "returncode")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def has_ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class ForkServer:
    """A process that has imported ``modules`` and forks others on request. It belongs to one event loop.

    What it forks runs ``python -P -m MODULE ARGUMENTS``, with an environment of its own; of that, what libraries
    read when they are loaded is the server's.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        self._modules = tuple(modules)
        # an import that may use several threads keeps them, and a process with threads cannot be forked
        self._environment = {**environment, "OMP_NUM_THREADS": "1"}
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._link: AsyncLink[News] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._usable: asyncio.Future[bool] | None = None
        self._is_gone = False
        self._wanted: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}

    async def start(self) -> None:
        """Start it; returns before it has imported anything. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await self._spawn(theirs)
            self._link = await AsyncLink.over(ours, _NEWS)
        except BaseException:
            ours.close()
            raise
        self._usable = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._link))

    async def fork(self, spec: ProcessSpec, log_file: Path) -> ForkedProcess:
        """Start a process once the server has imported its modules.

        Raises:
            ForkServerGone: it cannot be forked, or has ended.
            OSError: there is no room for another process now.
        """
        assert self._usable is not None and self._link is not None, "not started"
        if not await asyncio.shield(self._usable) or self._is_gone:
            raise ForkServerGone("the fork server is gone, or has threads")
        wanted: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        order = Fork(
            command=[os.fsencode(one) for one in spec.command],
            environment={os.fsencode(name): os.fsencode(value) for name, value in spec.environment.items()},
            log=os.fsencode(log_file),
        )
        self._link.send(order)
        self._wanted.append(wanted)
        return await wanted

    async def close(self) -> None:
        """End the server, and with it what it has started and still runs."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    def kill(self) -> None:
        """End the server, and with it what it has started, at once. :meth:`close` must still be awaited."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        command = [sys.executable, "-P", "-m", "epd_serve.launch.processes.fork_server", str(theirs.fileno())]
        with self._log_file.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                str(os.getpid()),
                *self._modules,
                " " * _TITLE_BYTES,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    async def _read(self, link: AsyncLink[News]) -> None:
        assert self._usable is not None
        try:
            with suppress(LinkClosed):
                while True:
                    self._told(await link.receive())
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:  # also where it is cancelled: nobody may wait for what will not be told
            if not self._usable.done():
                self._usable.set_result(False)
            self._is_gone = True
            for wanted in self._wanted:
                if not wanted.done():
                    wanted.set_exception(ForkServerGone("the fork server has ended"))
            for process in self._running.values():  # the kernel has ended them with the server
                process.has_ended(-signal.SIGKILL)

    def _told(self, news: News) -> None:
        match news:
            case Usable():
                assert self._usable is not None
                self._usable.set_result(news.yes)
            case Ended():
                process = self._running.pop(news.pid, None)
                if process is not None:
                    process.has_ended(news.code)
            case NotStarted():
                wanted = self._wanted.popleft()
                if not wanted.done():
                    wanted.set_exception(OSError(news.reason))
            case Started():
                started = self._running[news.pid] = ForkedProcess(news.pid)
                wanted = self._wanted.popleft()
                if wanted.done():  # nobody waits for it any more
                    with suppress(ProcessLookupError):
                        os.kill(started.pid, signal.SIGKILL)
                else:
                    wanted.set_result(started)
