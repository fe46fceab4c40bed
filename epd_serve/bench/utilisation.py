"""Utilisation of a server's devices on this machine: CPU time of its processes, and NVIDIA's own tool."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import time
from contextlib import suppress

import psutil

_QUERY = "index,utilization.gpu,memory.used,memory.total"


class LocalServer:
    """The processes behind a port of this machine; nothing where the server is elsewhere."""

    def __init__(self, address: str, port: int) -> None:
        is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self._root = _listener(port) if is_local else None
        self._nvidia = shutil.which("nvidia-smi") if self._root else None
        self._last: tuple[float, float] | None = None

    async def sample(self) -> dict[str, dict[str, float]]:
        """The figures of each device, by its name.

        ``utilisation`` since the last call (of all cores; of a GPU by its driver), ``cpu_s`` of each process of
        the server, and of a GPU ``memory_used_bytes`` and ``memory_bytes``.
        """
        if self._root is None:
            return {}
        by_process = _cpu_seconds(self._root)
        now_s, cpu_s = time.monotonic(), sum(by_process.values())
        cpu = {f"cpu_s:{name}": round(seconds, 3) for name, seconds in by_process.items()}
        if self._last is not None and now_s > self._last[0]:
            share = (cpu_s - self._last[1]) / (now_s - self._last[0]) / (os.cpu_count() or 1)
            cpu["utilisation"] = round(max(0.0, share), 4)
        self._last = now_s, cpu_s
        return {"cpu": cpu, **await self._gpus()}

    async def _gpus(self) -> dict[str, dict[str, float]]:
        if self._nvidia is None:
            return {}
        process = await asyncio.create_subprocess_exec(
            self._nvidia,
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(5):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            self._nvidia = None  # a driver that hangs is asked once
            return {}
        return parse_nvidia(output.decode())


def parse_nvidia(text: str) -> dict[str, dict[str, float]]:
    """Lines of index, per cent, MiB, MiB, without what the driver does not support or says in words."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        index, *values = (field.strip() for field in line.split(","))
        if not index.isdecimal():
            continue
        figures: dict[str, float] = {}
        for name, value, scale in zip(
            ("utilisation", "memory_used_bytes", "memory_bytes"), values, (0.01, 1 << 20, 1 << 20), strict=False
        ):
            with suppress(ValueError):
                figures[name] = float(value) * scale
        found[f"cuda:{index}"] = figures
    return found


def _listener(port: int) -> psutil.Process | None:
    """The process that listens on the port, or the server process that started it.

    None where nothing listens, or where this user may not see the process.
    """
    try:
        pids = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid
        }
        ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        root = psutil.Process(min(pids)) if pids else None
        while root is not None:
            parent = root.parent()
            if parent is None or parent.pid in ours or not _serves(parent):
                return root
            root = parent
    except (psutil.Error, PermissionError):
        pass
    return None


def _serves(process: psutil.Process) -> bool:
    return any("epd-serve" in part or "epd_serve" in part or "vllm" in part for part in process.cmdline())


def _cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """CPU seconds of the process and its descendants, by the name of the instance or of the program."""
    found: dict[str, float] = {}
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                name = _name(process)
                found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    with suppress(ValueError, IndexError):
        return line[line.index("--name") + 1]
    for word in ("proxy", "up", "serve"):
        if word in line[:5]:
            return word
    return process.name()
