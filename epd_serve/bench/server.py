"""The server under test: its model, and the stages of its requests where it is an epd-serve gateway."""

from __future__ import annotations

import os

import msgspec

from device.datasheets import emulated_kind
from epd_serve.bench.client import HttpClient
from epd_serve.bench.types import StageSpan

#: A gateway may hold its first answer back until its instances have loaded their model.
MEET_TIMEOUT_S = 60.0
_DASHBOARD_TIMEOUT_S = 10.0


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
    """One server.

    Attributes:
        model: the model to ask for.
        is_ours: whether it is an epd-serve gateway, which tells the stages of its requests.
        topology, version: of such a gateway.
        emulated: the emulated devices of its instances, as "emulated h200"; "" where there is none.
        stages: stages of the requests seen so far, by index.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._prefix = int.from_bytes(os.urandom(4))
        self._rest = os.urandom(12).hex()
        self.model = ""
        self.is_ours = False
        self.topology = self.version = self.emulated = ""
        self.stages: dict[int, list[StageSpan]] = {}

    async def meet(self, model: str) -> None:
        """Ask the server for its models and what it is; ``model``: "" takes its only one.

        Raises ValueError where it does not answer, lacks the model, or has several models and none is named.
        """
        answer = await self._client.get("/v1/models", timeout_s=MEET_TIMEOUT_S)
        url = self._client.base_url
        if answer.status == 401:
            raise ValueError(f"{url} refuses the API key (HTTP 401: {answer.detail}); export OPENAI_API_KEY=KEY")
        if answer.failure is not None:
            raise ValueError(f"{url}/v1/models: {answer.failure}: {answer.detail}; is --base-url right?")
        try:
            names = [str(one["id"]) for one in msgspec.json.decode(bytes(answer.body))["data"]]
        except (msgspec.MsgspecError, KeyError, TypeError):
            names = []
        if not model and len(names) != 1:
            raise ValueError(f"{url} has the models {', '.join(names) or '(none)'}; name one with --model")
        if model and names and model not in names:
            raise ValueError(f"{url} has no model {model}; it has {', '.join(names)}")
        self.model = model or names[0]
        dashboard = await self._dashboard()
        if dashboard is not None:
            self.is_ours = True
            self.topology, self.version = dashboard.topology or "", dashboard.version
            kinds = {
                emulated_kind(one.device)
                for one in dashboard.instances
                if one.device and one.device.startswith("emulated:")
            }
            self.emulated = f"emulated {', '.join(sorted(kinds))}" if kinds else ""

    def headers(self, index: int) -> dict[str, str]:
        """Return the headers that name a request in the server's logs; a warm-up has a negative index."""
        trace = f"{(self._prefix + index) & 0xFFFFFFFF:08x}{self._rest}"
        return {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "x-request-id": f"bench-{self._rest[:12]}-{index}",
            "traceparent": f"00-{trace}-{index + (1 << 40):016x}-00",
        }

    async def read_stages(self) -> bool:
        """Add to ``stages`` what the gateway's dashboard shows of its last requests.

        Returns whether some requests may have been missed, as all that it shows are new.
        """
        dashboard = await self._dashboard()
        if dashboard is None:
            return False
        num_known = 0
        for request in dashboard.requests:
            index = (int(request.id, 16) - self._prefix) & 0xFFFFFFFF
            num_known += index in self.stages
            self.stages[index] = [
                StageSpan(
                    stage=one.stage,
                    start_s=round(one.start_ms / 1e3, 6),
                    duration_s=round(one.ms / 1e3, 6),
                    instance=one.instance,
                    feature=one.feature,
                    failed=one.failed,
                )
                for one in request.stages
            ]
        return bool(dashboard.requests) and not num_known

    async def _dashboard(self) -> _Dashboard | None:
        answer = await self._client.get("/dashboard/data", timeout_s=_DASHBOARD_TIMEOUT_S)
        if answer.failure is not None:
            return None
        try:
            return msgspec.json.decode(bytes(answer.body), type=_Dashboard)
        except msgspec.MsgspecError:  # another program's dashboard
            return None
