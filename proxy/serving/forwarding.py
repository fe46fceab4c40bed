"""Forward the answers of P and D to the client unparsed, keeping their tokens for a retry."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from epd_serve.backends.base import Answer
from epd_serve.errors import (
    ErrorBody,
    ErrorEnvelope,
    InstanceFailed,
    InstanceLost,
    InvalidRequest,
    ServeError,
    error_from_response,
)
from epd_serve.routing.retry import CallFailed
from epd_serve.routing.routes import Route
from epd_serve.rpc.items import ItemReader
from epd_serve.rpc.messages import LinkClosed
from epd_serve.types import Stage
from proxy.http.client import Outlet
from proxy.observe.record import RequestRecord
from proxy.serving.job import Job

#: Most bytes of a token, counted again for itself and each alternative with logprobs; most bytes of an answer
#: besides its tokens.
_TOKEN_BYTES, _ANSWER_BYTES = 1024, 1024**2


class EventSink(msgspec.Struct, eq=False):
    """Writes server-sent events to an outlet; status and headers go out with the first.

    Attributes:
        outlet: once started, all but the last events may be written to it directly.
        started, ended: whether the first and the last event have been written.
    """

    outlet: Outlet
    record: RequestRecord
    started: bool = False
    ended: bool = False

    def write(self, events: bytes | memoryview, *, last: bool = False) -> bool:
        """Write events; return False if :meth:`drain` must follow."""
        if not self.started:
            self.started = True
            if self.record.ttft_s is None:
                self.record.ttft_s = time.monotonic() - self.record.arrived_s
            self.outlet.start((*_HEADERS, *self.record.headers))
        self.ended = last
        return self.outlet.write(events, last=last)

    async def finish(self) -> None:
        """End the stream and wait until the client has received it."""
        if not self.ended:
            self.outlet.write(b"", last=True)
        await self.outlet.drain()

    async def fail(self, error: ServeError) -> None:
        """Send an error event. The caller aborts the connection."""
        self.write(b"data: " + error.to_json() + b"\n\n")
        await self.outlet.drain()


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from buffering events
)


class Streamed(msgspec.Struct, eq=False):
    """A streamed answer, assembled from one or more instances.

    Attributes:
        known: whether the ids of all sent tokens are known.
        complete: whether the client has the whole answer.
        readers: readers of the instances' answers.
    """

    job: Job
    sink: EventSink
    known: bool = True
    complete: bool = False
    readers: list[ItemReader] = []

    @property
    def begun(self) -> bool:
        """True once the client has received a part of the answer."""
        return self.sink.started

    def generated(self) -> list[int] | None:
        """Return the tokens sent to the client; None if unknown or of several choices."""
        if not self.known or self.job.sampling.n > 1:
            return None
        return [token for reader in self.readers for token in reader.tokens]

    async def forward(self, stage: Stage, route: Route, answer: Answer) -> None:
        """Write one instance's events to the sink until its answer ends.

        Raises CallFailed if the instance reports an error or sends invalid data, InstanceLost if the connection
        breaks, ServeError if the answer cannot be forwarded.
        """
        sink = self.sink
        reader = ItemReader()
        self.readers.append(reader)
        self.known = self.known and answer.knows_tokens
        read, write, noted = reader.read, sink.outlet.write, self.job.record.forwarded
        failure: ServeError | None = None
        room, has_begun = _most_bytes(self.job, route), sink.started

        def relay(chunk: bytes) -> bool:
            """Forward one chunk; the hot path of every token."""
            nonlocal failure, room, has_begun
            room -= len(chunk)
            if room < 0:
                failure = _too_long(stage, route)
                return False
            try:
                events = read(chunk)
            except LinkClosed as error:
                failure = InstanceFailed(f"invalid answer of an instance: {error}")
                return False
            if has_begun and events and not reader.is_over:
                noted(events)
                return write(events)
            ended = self.complete = reader.ended
            if reader.error is not None and not ended:
                failure = _error_of(reader.error)
            if not events:
                return failure is None
            noted(events)
            has_begun = True
            return sink.write(events, last=ended) and failure is None

        try:
            while not await answer.forward(relay) and failure is None:
                await sink.outlet.drain()
        except ServeError:
            await sink.outlet.drain()
            if failure is None and not self.complete:  # else the instance reported the cause before
                raise
        else:
            await sink.outlet.drain()
        if failure is not None and not self.complete:
            raise CallFailed(stage, failure, began=True)


class Whole:
    """A whole answer, finally in ``body``."""

    begun = False

    def __init__(self, job: Job) -> None:
        self._job = job
        self.body = b""

    @property
    def complete(self) -> bool:
        return bool(self.body)

    def generated(self) -> None:
        """Return None: the client receives nothing before the answer is complete."""

    async def forward(self, stage: Stage, route: Route, answer: Answer) -> None:
        """Read one instance's answer to its end; raises like :meth:`Streamed.forward`.

        If D follows, P's body is empty after the handover or contains an error.
        """
        body, room = bytearray(), _most_bytes(self._job, route)
        try:
            async for chunk in answer.chunks():
                body += chunk
                if len(body) > room:
                    raise CallFailed(stage, _too_long(stage, route), began=True)
        except InstanceLost:
            if not (body and answer.decode_follows):
                raise
        if not answer.decode_follows:
            self.body = bytes(body)
        elif body:
            origin = f"instance {route.prefill.name}"
            error = error_from_response(InstanceFailed.status, bytes(body), origin=origin)
            raise CallFailed(stage, error, began=True)


def _most_bytes(job: Job, route: Route) -> int:
    """Return the most bytes that an answer of this request may have."""
    info = route.prefill.info
    context = route.max_model_len or (info.max_model_len if info else 1)
    num_tokens = min(job.sampling.max_tokens or context, context) + context * job.output.echo
    token_bytes = _TOKEN_BYTES * (1 if job.sampling.logprobs is None else 2 + job.sampling.logprobs)
    return _ANSWER_BYTES + job.sampling.n * num_tokens * token_bytes


def _too_long(stage: Stage, route: Route) -> InstanceFailed:
    return InstanceFailed(f"instance {route.at(stage).name} answered with more bytes than the request allows")


class InstanceBroke(InstanceFailed):
    """A live instance ended its answer with an error event."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message, param=error.param, code=error.code)
        self._error = error

    def body(self) -> dict[str, Any]:
        return {"error": {**super().body()["error"], "type": self._error.type}}


def _error_of(event: bytes) -> ServeError:
    """Return the error of an error event, caused by the request or the instance."""
    try:
        error = msgspec.json.decode(event.removeprefix(b"data:"), type=ErrorEnvelope).error
    except ValueError:  # also invalid UTF-8
        return InstanceBroke(ErrorBody(message="the instance broke off its answer", type=InstanceFailed.type))
    if error.type == InvalidRequest.type:
        return InvalidRequest(error.message, param=error.param, code=error.code)
    return InstanceBroke(error)
