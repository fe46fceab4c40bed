"""The server under test as it describes itself: model, metrics and, for our gateway, its requests' stages."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from epd_serve.bench.connection import Connections
from epd_serve.bench.types import StageSpan

#: For an answer to what is asked first: a gateway may hold it back until its instances have loaded their model.
MEET_TIMEOUT_S = 60.0
#: For what is asked besides; without an answer there is no figure.
LOOK_TIMEOUT_S = 10.0
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


class _Dashboard(msgspec.Struct):
    """The fields of our gateway's /dashboard/data that the load tester reads."""

    version: str
    requests: list[_Request]
    topology: str | None = None


class Server:
    """One server, asked over the connections that its requests use.

    Attributes:
        model: the model that requests ask for.
        is_ours: it has our gateway's dashboard, so that stages are known.
        topology, version: as our gateway states them.
    """

    def __init__(self, connections: Connections, *, api_key: str | None = None) -> None:
        self._connections = connections
        self._authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._prefix = int.from_bytes(os.urandom(4))
        self._rest = os.urandom(12).hex()
        self._seen: set[str] = set()
        self.model = ""
        self.is_ours = False
        self.topology = self.version = ""

    async def meet(self, model: str | None) -> None:
        """Ask the server for its models, and find out whether it is our gateway.

        Raises ValueError where it does not answer, or where it has several models and none is named.
        """
        answer = await self._connections.get("/v1/models", self._authorization, timeout_s=MEET_TIMEOUT_S)
        where = self._connections.target.url
        if answer.failure is not None:
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
