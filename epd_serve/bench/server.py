"""The server under test: what it says of itself, and the devices that it keeps busy."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import psutil

from device import npu_smi
from device.datasheets import emulated_kind
from epd_serve.bench.connection import Connections
from epd_serve.bench.statistics import wilson
from epd_serve.bench.types import Sample, Share, StageSpan

#: For an answer to what is asked first: a gateway may hold it back until its instances have loaded their model.
MEET_TIMEOUT_S = 60.0
#: For what is asked besides; without an answer there is no figure.
LOOK_TIMEOUT_S = 10.0
_TOOL_TIMEOUT_S = 5.0
#: Of other names in a page of metrics there may be thousands.
_PREFIXES = (b"epd_serve_", b"vllm:", b"sglang:", b"process_cpu_seconds_total", b"process_resident_memory_bytes")


#: Name, labels in quotes, value; a time or an exemplar may follow.
_SAMPLE = re.compile(
    rb'(?P<name>(?P<bare>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?)\s+(?P<value>\S+)'
)


class _Stage(msgspec.Struct):
    stage: str
    start_ms: float
    ms: float
    instance: str = ""
    feature: str = ""
    failed: bool = False


class _Request(msgspec.Struct):
    id: str
    stages: list[_Stage]


class _Instance(msgspec.Struct):
    device: str | None = None


class _Dashboard(msgspec.Struct):
    """The fields of our gateway's /dashboard/data that the load tester reads."""

    version: str
    requests: list[_Request]
    topology: str | None = None
    instances: list[_Instance] = []


class Server:
    """One server, asked over the connections that its requests use.

    Attributes:
        model: the model that requests ask for.
        is_ours: it has our gateway's dashboard, so that stages are known.
        topology, version: as our gateway states them.
        emulated: the emulated devices of its instances, as "emulated h200"; "" where there is none.
    """

    def __init__(self, connections: Connections, *, api_key: str | None = None) -> None:
        self._connections = connections
        self._authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._prefix = int.from_bytes(os.urandom(4))
        self._rest = os.urandom(12).hex()
        self._seen: set[str] = set()
        self.model = ""
        self.is_ours = False
        self.topology = self.version = self.emulated = ""

    async def meet(self, model: str | None) -> None:
        """Ask the server for its models, and find out whether it is our gateway.

        Raises ValueError where it does not answer, or where it has several models and none is named.
        """
        answer = await self._connections.get("/v1/models", self._authorization, timeout_s=MEET_TIMEOUT_S)
        where = self._connections.target.url
        if answer.failure is not None:
            if answer.status == 401:
                sent = "OPENAI_API_KEY is no key of it" if self._authorization else "OPENAI_API_KEY is not set"
                raise ValueError(f"{where} asks for an API key (HTTP 401), and {sent}; export OPENAI_API_KEY=KEY")
            status = f" (HTTP {answer.status})" if answer.status else ""
            raise ValueError(f"{where}/v1/models: {answer.failure}{status}: {answer.detail}; is --base-url right?")
        names = _model_names(bytes(answer.body))
        if model is None and len(names) != 1:
            raise ValueError(f"{where} has the models {', '.join(names) or '(none)'}; name one with --model")
        if model is not None and names and model not in names:
            raise ValueError(f"{where} has no model {model}; it has {', '.join(names)}")
        self.model = model or names[0]
        dashboard = await self._dashboard()
        if dashboard is not None:
            self.is_ours = True
            self.topology, self.version = dashboard.topology or "", dashboard.version
            self.emulated = _emulated([one.device or "" for one in dashboard.instances])

    def headers(self, index: int) -> str:
        """The lines that each request has besides its length; they name it for the server's logs."""
        span = index + (1 << 40)  # of a warm-up the index is negative
        return (
            "content-type: application/json\r\naccept: text/event-stream\r\n"
            f"x-request-id: {self.request_id(index)}\r\n"
            f"traceparent: 00-{self._trace(index)}{self._rest}-{span:016x}-00\r\n{self._authorization}"
        )

    def request_id(self, index: int) -> str:
        return f"bench-{self._rest[:12]}-{index}"

    async def metrics(self) -> dict[str, float]:
        """Read /metrics: values by name with labels, without buckets; empty where there is no such page."""
        answer = await self._connections.get("/metrics", self._authorization, timeout_s=LOOK_TIMEOUT_S)
        return {} if answer.failure is not None else parse_metrics(bytes(answer.body))

    async def new_stages(self, take: Callable[[int, list[StageSpan]], None]) -> bool:
        """Call ``take`` with the stages of each request that ended since the last call.

        Returns whether some may have been missed: the gateway's dashboard shows its last requests only.
        """
        dashboard = await self._dashboard()
        if dashboard is None:
            return False
        num_seen = 0
        for request in dashboard.requests:
            if request.id in self._seen:
                num_seen += 1
                continue
            self._seen.add(request.id)
            index = (int(request.id, 16) - self._prefix) & 0xFFFFFFFF
            take(index, [_span(stage) for stage in request.stages])
        return bool(dashboard.requests) and not num_seen

    async def _dashboard(self) -> _Dashboard | None:
        answer = await self._connections.get("/dashboard/data", self._authorization, timeout_s=LOOK_TIMEOUT_S)
        if answer.failure is not None:
            return None
        try:
            return msgspec.json.decode(bytes(answer.body), type=_Dashboard)
        except msgspec.MsgspecError:  # another's dashboard
            return None

    def _trace(self, index: int) -> str:
        """The part of a trace id that our gateway's dashboard shows."""
        return f"{(self._prefix + index) & 0xFFFFFFFF:08x}"


def parse_metrics(page: bytes) -> dict[str, float]:
    """The samples of a Prometheus text page that a server of models is judged by."""
    found: dict[str, float] = {}
    for line in page.split(b"\n"):
        sample = _SAMPLE.match(line) if line.startswith(_PREFIXES) else None
        if sample is None or sample["bare"].endswith((b"_bucket", b"_created")):
            continue
        with suppress(ValueError):  # no number, or a name that is no text
            number = float(sample["value"])
            if math.isfinite(number):  # JSON has no other
                found[sample["name"].decode()] = number
    return found


def _model_names(body: bytes) -> list[str]:
    try:
        found: Any = msgspec.json.decode(body)
        return [str(one["id"]) for one in found["data"]]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []


def _span(stage: _Stage) -> StageSpan:
    return StageSpan(
        stage=stage.stage,
        start_s=round(stage.start_ms / 1e3, 6),
        duration_s=round(stage.ms / 1e3, 6),
        instance=stage.instance,
        feature=stage.feature,
        failed=stage.failed,
    )


class LocalServer:
    """The processes behind a port of this machine; nothing where the server is elsewhere."""

    def __init__(self, address: str, port: int) -> None:
        is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        self._root = _listener(port) if is_local else None
        self._tools = [tool for tool in _TOOLS if self._root and shutil.which(tool[0])]
        self._last: tuple[float, float] | None = None

    async def sample(self) -> dict[str, dict[str, float]]:
        """The figures of each device, by its name.

        ``utilisation`` since the last call (of all cores; of a GPU or NPU by its driver), ``cpu_s`` of each
        process of the server, and of a GPU or NPU ``memory_used_bytes`` and ``memory_bytes``.
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
        devices = {"cpu": cpu}
        for command in list(self._tools):
            output = await _output(command)
            if output is None:
                self._tools.remove(command)  # a driver that hangs is asked once
            else:
                devices |= _TOOLS[command](output)
        return devices


async def _output(command: Sequence[str]) -> str | None:
    """Run a program and return what it prints; None where it does not end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_TOOL_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    return output.decode(errors="replace")


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


def parse_npus(text: str) -> dict[str, dict[str, float]]:
    """The chips that npu-smi lists, without what it gives no number for."""
    return {
        f"npu:{index}": {
            name: float(value)
            for name in ("utilisation", "memory_used_bytes", "memory_bytes")
            if (value := getattr(chip, name)) is not None
        }
        for index, chip in enumerate(npu_smi.parse(text))
    }


#: The parser of each driver's tool.
_TOOLS = {
    (
        "nvidia-smi",
        "--query-gpu=index,utilization.gpu,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ): parse_nvidia,
    npu_smi.COMMAND: parse_npus,
}


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


#: (hits, lookups) by what is cached; of our gateway, and of vLLM.
_CACHES = {
    "media": [
        ("epd_serve_mm_cache_hits_total", "epd_serve_mm_cache_queries_total"),
        ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
    ],
    "prefix": [("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")],
}


class Sampled(msgspec.Struct, kw_only=True):
    """Attributes:
    cache_hits: share of the lookups during the run that hit, for "media" and "prefix".
    utilisation: mean during the run, 0..1, by device.
    cpu_s: CPU seconds during the run of the server's processes on this machine, by name.
    """

    cache_hits: dict[str, Share]
    utilisation: dict[str, float]
    cpu_s: dict[str, float]


def sampled(samples: Sequence[Sample]) -> Sampled:
    """Sum the growth of each counter from sample to sample; the gap before a run was resumed does not count.

    A counter that fell belongs to a server that was started again; it grew from 0.
    """
    found = Sampled(cache_hits={}, utilisation={}, cpu_s={})
    if len(samples) < 2:
        return found
    last, phases = samples[-1], [one.phase for one in samples]
    for cache, names in _CACHES.items():
        for hits, lookups in names:
            whole = round(_growth([_total(one, lookups) for one in samples], phases))
            if whole > 0:
                part = round(_growth([_total(one, hits) for one in samples], phases))
                found.cache_hits[cache] = wilson(min(part, whole), whole)
    for device in last.devices:
        values = [
            value
            for sample in samples
            if sample.phase != "before"
            and (value := sample.devices.get(device, {}).get("utilisation")) is not None
        ]
        if values:
            found.utilisation[device] = sum(values) / len(values)
    for name in last.devices.get("cpu", {}):
        kind, _, process = name.partition(":")
        if kind == "cpu_s":
            grown = _growth([one.devices.get("cpu", {}).get(name, 0.0) for one in samples], phases)
            found.cpu_s[process] = round(grown, 3)
    return found


def _growth(values: Sequence[float], phases: Sequence[str]) -> float:
    grown = 0.0
    for (before, after), phase in zip(pairwise(values), phases[1:], strict=True):
        if phase != "before":
            grown += after - before if after >= before else after
    return grown


def _total(sample: Sample, name: str) -> float:
    """The sum of a metric over all its labels."""
    return sum(value for key, value in sample.metrics.items() if key.partition("{")[0] == name)


def _emulated(devices: Sequence[str]) -> str:
    """The kinds among names such as emulated:h200:0, with what is said of them."""
    kinds = sorted({emulated_kind(name) for name in devices if name.startswith("emulated:")})
    return f"emulated {', '.join(kinds)}" if kinds else ""
