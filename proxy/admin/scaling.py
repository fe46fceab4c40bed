"""The part of the admin API that ``epd-serve autoscale`` asks: loads, served requests and its own decisions."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from epd_serve.autoscale.instance_load import instance_loads, to_json
from epd_serve.errors import InvalidRequest
from epd_serve.routing.table import InstanceTable
from proxy.observe.access_log import line_of
from proxy.observe.record import RequestRecord

_NUM_DECISIONS = 500
_MAX_DECISION_BYTES = 64 * 1024
#: More than are served between two looks.
_NUM_REQUESTS = 4096


class ServedRequests:
    """The latest served requests as lines of the access log, numbered from 1 on."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_NUM_REQUESTS)
        self._last = 0

    def put(self, record: RequestRecord) -> None:
        """A request is over."""
        self._last += 1
        self._lines.append(msgspec.json.encode(line_of(record)))

    def after(self, number: int) -> tuple[int, list[bytes]]:
        """The number of the last one, and those after ``number``; all of them for a number that none has yet."""
        if number > self._last:
            number = 0
        lines = list(self._lines)
        return self._last, lines[max(0, len(lines) - (self._last - number)) :]


def scaling_router(table: InstanceTable, served: ServedRequests) -> APIRouter:
    """``GET /load``, ``GET /requests/served``, and ``GET`` and ``POST /elastic``."""
    router = APIRouter()
    decisions: deque[dict[str, Any]] = deque(maxlen=_NUM_DECISIONS)

    @router.get("/load")
    async def load() -> JSONResponse:
        """Each instance's seconds of pending work, and the tokens that a pixel of an image becomes."""
        tokens = max((one.info.tokens_per_pixel for one in table if one.info is not None), default=0.0)
        return JSONResponse({"instances": to_json(instance_loads(table)), "tokens_per_pixel": tokens})

    @router.get("/requests/served")
    async def requests_served(after: int = 0) -> Response:
        """The lines of the access log after that number, and ``last``, the number of the last one.

        They are kept where the deployment has the section ``elastic``.
        """
        last, lines = served.after(after)
        content = {"last": last, "requests": [msgspec.Raw(line) for line in lines]}
        return Response(msgspec.json.encode(content), media_type="application/json")

    @router.get("/elastic")
    async def elastic() -> JSONResponse:
        """The decisions of ``epd-serve autoscale``, newest last; those that it reported to this gateway."""
        return JSONResponse({"decisions": list(decisions)})

    @router.post("/elastic")
    async def report(request: Request) -> JSONResponse:
        """Take down a decision."""
        if len(await request.body()) > _MAX_DECISION_BYTES:
            raise InvalidRequest(f"a decision has at most {_MAX_DECISION_BYTES} bytes")
        try:
            decisions.append(msgspec.json.decode(await request.body(), type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"a decision is a JSON object: {error}") from error
        return JSONResponse({})

    return router
