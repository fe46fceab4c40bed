"""Forwards the answers of P and D to the client: bytes pass unparsed, and their tokens are noted for a retry."""

from __future__ import annotations

import re
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

#: What a token may take of an answer, once more for itself and each alternative where its log-probability is told;
#: what an answer has beside them.
_TOKEN_BYTES, _ANSWER_BYTES = 1024, 1024**2


class EventSink(msgspec.Struct, eq=False):
    """Writes whole server-sent events to an outlet; status and headers go out with the first of them.

    Attributes:
        outlet: once it has started, events that are not the last may be written there directly.
        started, ended: whether the first and the last events were written.
        is_out: whether the last events were written and the client has room for them.
    """

    outlet: Outlet
    record: RequestRecord
    started: bool = False
    ended: bool = False
    is_out: bool = False

    def write(self, events: bytes | memoryview, *, last: bool = False) -> bool:
        """Write events; return False where :meth:`drain` must come before the next ones."""
        if not self.started:
            self.started = True
            if self.record.ttft_s is None:
                self.record.ttft_s = time.monotonic() - self.record.arrived_s
            self.outlet.start((*_HEADERS, *self.record.headers))
        self.ended = last
        flows = self.outlet.write(events, last=last)
        self.is_out = last and flows
        return flows

    async def drain(self) -> None:
        """Wait until the client can take more."""
        await self.outlet.drain()

    async def finish(self) -> None:
        """Write the end where it is not written, and wait until the client has it."""
        if not self.ended:
            self.outlet.write(b"", last=True)
        await self.outlet.drain()

    async def fail(self, error: ServeError) -> None:
        """Tell the client what happened. The caller aborts the connection."""
        self.write(b"data: " + error.to_json() + b"\n\n")
        await self.outlet.drain()


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class Streamed(msgspec.Struct, eq=False):
    """A streamed answer, over all instances that give a part of it.

    Attributes:
        known: whether the ids of all tokens that the client has are known.
        complete: whether the client has the whole answer.
        readers: of the instances whose answers came in items.
    """

    job: Job
    sink: EventSink
    known: bool = True
    complete: bool = False
    readers: list[ItemReader] = []

    @property
    def begun(self) -> bool:
        """Whether the client has a part of the answer."""
        return self.sink.started

    def num_tokens(self) -> int:
        """Count the output's tokens, over all choices, as far as they came in items."""
        return sum([len(reader.tokens) for reader in self.readers])

    def generated(self) -> list[int] | None:
        """Return the tokens that the client has; None where they are not known, or of several choices."""
        if not self.known or self.job.sampling.n > 1:
            return None
        return [token for reader in self.readers for token in reader.tokens]

    async def forward(self, stage: Stage, route: Route, answer: Answer) -> None:
        """Write one instance's events to the sink until its answer ends.

        Raises CallFailed where the instance reports an error or sends what no instance should, InstanceLost where
        the connection breaks, ServeError where the answer cannot be passed on.
        """
        sink = self.sink
        reader: ItemReader | _PlainEvents
        if answer.framed:
            reader = ItemReader()
            self.readers.append(reader)
        else:
            self.known, reader = False, _PlainEvents()
        read, write, noted = reader.read, sink.outlet.write, self.job.record.forwarded
        failure: ServeError | None = None
        room, has_begun = _most_bytes(self.job, route), sink.started

        def relay(chunk: bytes) -> bool:
            """Called for each token: it calls little."""
            nonlocal failure, room, has_begun
            room -= len(chunk)
            if room < 0:
                failure = _too_long(stage, route)
                return False
            try:
                events = read(chunk)
            except LinkClosed as error:
                failure = InstanceFailed(f"an instance's answer cannot be read: {error}")
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
                await sink.drain()
        except ServeError:
            await sink.drain()
            if failure is None and not self.complete:  # else it has said why, and was cut off behind it
                raise
        else:
            await sink.drain()
        if failure is not None and not self.complete:
            raise CallFailed(stage, failure, began=True)


class Whole:
    """An answer in one piece, in ``body`` at its end."""

    begun = False

    def __init__(self, job: Job) -> None:
        self._job = job
        self.body = b""

    @property
    def complete(self) -> bool:
        return bool(self.body)

    def generated(self) -> None:
        """No part of the answer is sent before it is complete."""

    async def forward(self, stage: Stage, route: Route, answer: Answer) -> None:
        """Read one instance's answer to its end; raises as :meth:`Streamed.forward` does.

        Where D follows, P's body is empty once the KV is handed over, or says why that failed.
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
    """Return the bytes of an answer with all the tokens of its request, each as long as tokens come."""
    info = route.prefill.info
    context = route.max_model_len or (info.max_model_len if info else 1)
    num_tokens = min(job.sampling.max_tokens or context, context) + context * job.output.echo
    token_bytes = _TOKEN_BYTES * (1 if job.sampling.logprobs is None else 2 + job.sampling.logprobs)
    return _ANSWER_BYTES + job.sampling.n * num_tokens * token_bytes


def _too_long(stage: Stage, route: Route) -> InstanceFailed:
    name = (route.prefill if stage is Stage.PREFILL else route.decode).name
    return InstanceFailed(f"instance {name} answered with more than the request's tokens can be")


_END_OF_EVENT = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERROR = re.compile(rb'data: ?\{ ?"error"')


class InstanceBroke(InstanceFailed):
    """An instance has sent an error event in place of the rest of its answer. It is alive."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message, param=error.param, code=error.code)
        self._error = error

    def body(self) -> dict[str, Any]:
        return {"error": {**super().body()["error"], "type": self._error.type}}


def _error_of(event: bytes) -> ServeError:
    """Return the error of an error event: the request's own, or the instance's."""
    try:
        error = msgspec.json.decode(event.removeprefix(b"data:"), type=ErrorEnvelope).error
    except msgspec.MsgspecError:
        return InstanceBroke(ErrorBody(message="the instance broke off its answer", type=InstanceFailed.type))
    if error.type == InvalidRequest.type:
        return InvalidRequest(error.message, param=error.param, code=error.code)
    return InstanceBroke(error)


class _PlainEvents:
    """Splits server-sent events as :class:`ItemReader` splits items, without their tokens.

    An incomplete event waits for its rest.
    """

    __slots__ = ("_pending", "ended", "error")

    def __init__(self) -> None:
        self._pending = b""
        self.ended = False
        self.error: bytes | None = None

    @property
    def is_over(self) -> bool:
        return self.ended or self.error is not None

    def read(self, chunk: bytes) -> bytes:
        if self._pending:
            chunk = self._pending + chunk
            self._pending = b""
        if not chunk.endswith(_END_OF_EVENT):
            end = chunk.rfind(_END_OF_EVENT)
            end = 0 if end < 0 else end + len(_END_OF_EVENT)
            chunk, self._pending = chunk[:end], chunk[end:]
        if chunk:
            self.ended = chunk.endswith(_DONE) and not self._pending
            start = chunk.rfind(_END_OF_EVENT, 0, -len(_END_OF_EVENT))
            last = 0 if start < 0 else start + len(_END_OF_EVENT)
            if _ERROR.match(chunk, last):
                self.error = chunk[last:]
                return chunk[:last]
        return chunk
