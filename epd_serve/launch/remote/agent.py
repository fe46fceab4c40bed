"""``epd-serve agent``: one place's part of a deployment, its instances at their gateways while they are ready."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import join_headers
from epd_serve.launch.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState
from epd_serve.launch.remote.part import Part, part_specs
from epd_serve.launch.supervisor import Supervisor
from epd_serve.rpc.cluster import check_cluster_key, cluster_key
from epd_serve.rpc.joining import join_all

logger = logging.getLogger(__name__)


async def run_agent(part: Part, *, host: str, gateways: Sequence[str], health_port: int | None) -> int:
    """Run a part until SIGTERM or SIGINT; returns the exit code, 1 where a process died before it was ready.

    Args:
        host: address that the instances listen on, and under which others reach them.
        gateways: URLs of admin planes that they join.
        health_port: port of ``/health/live`` and ``/health/ready``; None: there is none.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="epd-serve-agent-") as directory:
        specs = part_specs(part, host, os.environ, Path(directory))
        places = _Places(part, gateways)
        supervisor = Supervisor(
            specs,
            Path(directory),
            restart=part.config.restart == "on-failure",
            hang_timeout_s=part.config.hang_timeout_s,
            on_change=places.follow,
            on_death=lambda death, delay_s: logger.warning("%s; it is started again in %g s", death, delay_s),
            start=_spawn,
        )
        health = None if health_port is None else await asyncio.start_server(places.answer, host, health_port)
        tasks = [asyncio.create_task(_run(supervisor)), asyncio.create_task(stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                logger.error("%s", tasks[0].result())
                return 1
        finally:
            await places.leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await supervisor.stop()
            if health is not None:
                health.close()
    return 0


async def _run(supervisor: Supervisor) -> ProcessDied:
    await supervisor.start()
    return await supervisor.wait_failure()


class _Places:
    """The places of the instances at their gateways: each has one while it is ready."""

    def __init__(self, part: Part, gateways: Sequence[str]) -> None:
        self._roles = {part.names[one.name]: str(one.role) for one in part.placement}
        self._gateways = gateways
        self._headers = join_headers()
        named = read_secret(part.config.cluster_key, "cluster_key")
        self._key = cluster_key() if named is None else check_cluster_key(named, "cluster_key")
        self._tls = part.config.read_tls()
        self._ready: set[str] = set()
        self._joined: dict[str, asyncio.Task[None]] = {}

    def follow(self, process: ManagedProcess) -> None:
        """A process has another state."""
        name = process.spec.name
        logger.info("%s %s", name, process.state)
        if process.state is ProcessState.READY:
            self._ready.add(name)
            joining = join_all(
                self._gateways,
                name,
                process.spec.url,
                self._headers,
                role=self._roles[name],
                key=self._key,
                tls=self._tls,
            )
            self._joined[name] = asyncio.create_task(joining)
        elif name in self._ready:
            self._ready.remove(name)
            self._joined[name].cancel()

    async def leave(self) -> None:
        """All of them, before their processes are told to end."""
        self._ready.clear()
        for task in self._joined.values():
            task.cancel()
        await asyncio.gather(*self._joined.values(), return_exceptions=True)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One probe of an orchestrator."""
        try:
            async with asyncio.timeout(5):
                path = (await reader.readline()).split(b" ")[1:2]
                while (await reader.readline()).strip():
                    pass
            live, ready = path == [b"/health/live"], path == [b"/health/ready"]
            status = "200 OK" if live or (ready and len(self._ready) == len(self._roles)) else "503 Not Ready"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()


async def _spawn(spec: ProcessSpec, log_file: Path) -> asyncio.subprocess.Process:
    """A process with the agent's own output, which whoever runs the agent collects."""
    return await asyncio.create_subprocess_exec(
        *spec.command,
        stdin=asyncio.subprocess.DEVNULL,
        env=dict(spec.environment),
        start_new_session=True,
        pass_fds=spec.descriptors,
    )
