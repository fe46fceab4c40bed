"""``POST /v1/responses``: a chat for the instances, responses for the client. Here the events are parsed."""

from __future__ import annotations

import msgspec

from epd_serve.protocol.openai import GenerationRequest
from epd_serve.protocol.response_events import Event, ResponseBuilder, event_bytes
from epd_serve.protocol.responses import ResponsesCall
from proxy.api.endpoint import GenerationEndpoint
from proxy.dispatch.job import Job
from proxy.http.client import Outlet

_END_OF_EVENT = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class ResponsesEndpoint(GenerationEndpoint):
    """Translates between the two APIs on the way in (by its request) and out."""

    def _translation(self, request: GenerationRequest, job: Job, outlet: Outlet) -> Outlet:
        return _Translation(_builder(request, job), outlet)

    def _translate(self, request: GenerationRequest, job: Job, answer: bytes) -> bytes:
        return msgspec.json.encode(_builder(request, job).whole(msgspec.json.decode(answer)))


def _builder(request: GenerationRequest, job: Job) -> ResponseBuilder:
    assert isinstance(request, ResponsesCall)
    return ResponseBuilder(request.asked, id=job.id, created=job.output.created, model=job.model)


class _Translation:
    """An outlet for chat chunks: whole events come in, whole events go out."""

    def __init__(self, builder: ResponseBuilder, outlet: Outlet) -> None:
        self._builder = builder
        self._outlet = outlet
        self.start = outlet.start
        self.drain = outlet.drain

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = bytes(data).split(_END_OF_EVENT)
        body = b"".join(event_bytes(*new) for event in events if event for new in self._events_of(event))
        return self._outlet.write(body, last=last) if body or last else True

    def _events_of(self, event: bytes) -> list[Event]:
        data = event.removeprefix(_DATA)
        if data == _DONE:
            return self._builder.end()
        chunk = msgspec.json.decode(data)
        return self._builder.failed(chunk["error"]) if "error" in chunk else self._builder.feed(chunk)
