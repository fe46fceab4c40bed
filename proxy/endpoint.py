"""``POST /v1/chat/completions`` and ``/v1/completions`` as pure ASGI: read, check, run, answer."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ModelNotFound, ServeError, StageTimeout, TooLarge, Unavailable
from epd_serve.metrics.gateway import GatewayMetrics
from epd_serve.protocol.messages import MediaSource
from epd_serve.protocol.openai import GenerationRequest
from epd_serve.protocol.wire import REQUEST_ID_HEADER
from epd_serve.routing.table import InstanceTable
from proxy.arrival import ArrivalLimits
from proxy.attempt import Job
from proxy.gate import Gate, Visit
from proxy.generation import Generator
from proxy.limits import BYTES_PER_TOKEN, estimate_tokens
from proxy.media import MediaItem, MediaLoader
from proxy.observer import Observer
from proxy.poller import Poller
from proxy.several import stream_several, whole_several
from proxy.sink import EventSink, ResponseAborted, send_error, send_json
from proxy.trail import Trail

logger = logging.getLogger(__name__)

_TRACE_ID = re.compile(r"[\x21-\x7e]{1,256}")
#: Statuses of our own, for metrics only.
CLIENT_LEFT = 499
BROKEN_OFF = 599


class ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


class Endpoint:
    """Reads and checks a request and bounds its time, as an ASGI application; :meth:`_generate` answers it."""

    def __init__(
        self,
        *,
        kind: str,
        table: InstanceTable,
        poller: Poller,
        loader: MediaLoader,
        metrics: GatewayMetrics,
        gate: Gate,
        observer: Observer,
        arrival: ArrivalLimits,
        max_body_bytes: int,
        timeout_s: float,
    ) -> None:
        self._kind = kind
        self._table = table
        self._poller = poller
        self._loader = loader
        self._metrics = metrics
        self._gate = gate
        self._observer = observer
        self._arrival = arrival
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    def reconfigure(self, *, max_body_bytes: int, timeout_s: float) -> None:
        """For the next requests."""
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        exchange = Exchange(headers, send, self._observer.begin(self._kind, headers))
        try:
            visit = self._gate.enter(exchange.headers.get("authorization"))
        except ServeError as error:
            await send_error(send, error, exchange.trail)
            self._count(exchange, error.status, error)
            return
        exchange.trail.key = visit.client.name
        try:
            await self._serve(exchange, visit, receive)
        finally:
            visit.leave()

    async def _serve(self, exchange: Exchange, visit: Visit, receive: Receive) -> None:
        try:
            body = await self._receive(exchange, receive)
        except ServeError as error:
            await send_error(exchange.send, error, exchange.trail)
            self._count(exchange, error.status, error)
            return
        except ClientLeft:
            self._count(exchange, CLIENT_LEFT)
            return
        work = asyncio.create_task(self._answer(exchange, visit, body))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.answered:
                work.cancel()
                await asyncio.wait({work})
            if work.cancelled():
                self._count(exchange, CLIENT_LEFT)
            else:
                await work
        finally:
            work.cancel()
            leaving.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)

    async def _receive(self, exchange: Exchange, receive: Receive) -> bytearray:
        trace_id = exchange.headers.get(REQUEST_ID_HEADER)
        if trace_id:
            if not _TRACE_ID.fullmatch(trace_id):
                raise InvalidRequest(
                    f"the header {REQUEST_ID_HEADER} takes 1 to 256 printable ASCII characters without spaces",
                    param=REQUEST_ID_HEADER,
                )
            exchange.trail.request_id = trace_id
        length = exchange.headers.get("content-length", "")
        declared = int(length) if length.isdigit() else None
        try:
            async with asyncio.timeout(self._arrival.time_for_body(declared)):
                return await _read_body(exchange.headers, receive, self._max_body_bytes)
        except TimeoutError:
            raise self._arrival.too_slow(declared) from None

    async def _answer(self, exchange: Exchange, visit: Visit, body: bytearray) -> None:
        sink = EventSink(exchange.stream_send(self._first_token), exchange.trail)
        status, failure = 200, None
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._generate(exchange, visit, body, sink)
            except TimeoutError as error:
                raise StageTimeout(
                    f"the request took longer than {self._timeout_s:g} s, this gateway's limit"
                ) from error
        except ServeError as error:
            status, failure = BROKEN_OFF if sink.started else error.status, error
            if error.status >= 500:
                logger.warning("request %s: %s", exchange.trail.request_id, error.message)
            exchange.answered = True
            if not sink.started:
                await send_error(exchange.send, error, exchange.trail)
                return
            await sink.fail(error)
            raise ResponseAborted(error.message) from error
        except Exception:
            # A fault of the gateway's own: the application answers it, or the server cuts the stream off.
            status = BROKEN_OFF if sink.started else 500
            exchange.answered = True
            raise
        finally:
            if exchange.answered:
                self._count(exchange, status, failure)

    async def _generate(self, exchange: Exchange, visit: Visit, body: bytearray, sink: EventSink) -> None:
        """Answer a request, through ``sink`` or in one piece. Raises ServeError, even after the first byte."""
        raise NotImplementedError

    async def _media(self, exchange: Exchange, sources: list[MediaSource]) -> list[MediaItem]:
        items = await self._loader.load(sources) if sources else []
        exchange.trail.media(len(items), sum(len(item.data) for item in items))
        self._metrics.media_bytes.labels("image").inc(exchange.trail.media_bytes)
        return items

    def _model(self, wanted: str | None) -> str:
        models = self._table.models()
        if not models:
            raise Unavailable("no instance has started yet; try again shortly")
        if wanted is None:
            return next(iter(models))
        if wanted not in models:
            known = ", ".join(repr(name) for name in models)
            raise ModelNotFound(f"there is no model {wanted[:100]!r}; served here: {known}", param="model")
        return wanted

    def _first_token(self, exchange: Exchange) -> None:
        self._observer.first_token(exchange.trail)

    def _count(self, exchange: Exchange, status: int, error: ServeError | None = None) -> None:
        self._observer.finish(exchange.trail, status, "" if error is None else error.code or error.type)


class GenerationEndpoint(Endpoint):
    """An endpoint whose answer is generated."""

    def __init__(
        self, *, parse: Callable[[bytearray], GenerationRequest], generator: Generator, **shared: Any
    ) -> None:
        super().__init__(**shared)
        self._parse = parse
        self._generator = generator

    async def _generate(self, exchange: Exchange, visit: Visit, body: bytearray, sink: EventSink) -> None:
        request = self._parse(body)
        sources = request.media()
        text_bytes = len(body) - sum(len(source.url) for source in sources)
        body.clear()
        await self._poller.started()
        model = exchange.trail.model = self._model(request.model)
        num_choices = (request.n or 1) * max(1, len(request.prompts()))
        num_tokens = estimate_tokens(text_bytes, request.token_limit(), num_choices)
        waiting = visit.admit(
            priority=request.priority or 0,
            num_tokens=num_tokens,
            num_prompt_tokens=text_bytes // BYTES_PER_TOKEN,
            has_media=bool(sources),
        )
        if waiting is not None:
            since_s = time.monotonic()
            await waiting
            exchange.trail.queued(since_s)
        items = await self._media(exchange, sources)
        jobs = self._jobs(exchange, request, model, items)
        exchange.trail.streamed = bool(request.stream)
        if request.stream:
            exchange.translate = self._translation(request, jobs[0], exchange.send)
            if len(jobs) == 1:
                await self._generator.stream(jobs[0], sink)
            else:
                await stream_several(self._generator, jobs, sink)
            exchange.answered = True
            await sink.finish()
        else:
            if len(jobs) == 1:
                answer = await self._generator.whole(jobs[0])
            else:
                answer = await whole_several(self._generator, jobs)
            exchange.trail.answered(answer)
            answer = self._translate(request, jobs[0], answer)
            exchange.answered = True
            await send_json(exchange.send, 200, answer, exchange.trail)

    def _jobs(
        self, exchange: Exchange, request: GenerationRequest, model: str, items: list[MediaItem]
    ) -> list[Job]:
        """One job for each of the request's prompts."""
        answer_id = uuid.uuid4().hex
        output = request.output(id=answer_id, created=int(time.time()), model=model)
        chat = request.chat()
        prompts: Sequence[str | list[int] | None] = request.prompts() if chat is None else [None]
        return [
            Job(
                id=answer_id if index == 0 else uuid.uuid4().hex,
                trace_id=exchange.trail.request_id,
                trail=exchange.trail,
                model=model,
                output=output if index == 0 else replace(output, first_index=index * (request.n or 1)),
                sampling=request.sampling(secrets.randbits(63)),
                prompting=request.prompting(),
                messages=chat,
                prompt=prompt,
                items=items,
                arrived_s=exchange.trail.arrived_s,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _translation(self, request: GenerationRequest, job: Job, send: Send) -> Send:
        """What a streamed answer goes through on its way to ``send``."""
        return send

    def _translate(self, request: GenerationRequest, job: Job, answer: bytes) -> bytes:
        """The same for an answer in one piece."""
        return answer


class Exchange:
    """One request and its answer.

    Attributes:
        answered: the last word is on its way; a client that leaves from now on has left nothing.
        trail: what is noted of it.
        translate: what a streamed answer goes through, where it goes through anything.
    """

    def __init__(self, headers: Headers, send: Send, trail: Trail) -> None:
        self.headers = headers
        self.send = send
        self.trail = trail
        self.answered = False
        self.translate: Send | None = None

    def stream_send(self, first_token: Callable[[Exchange], None]) -> Send:
        """``send`` that reports the start of a streamed answer, which comes with the first token."""

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                first_token(self)
            await (self.translate or self.send)(message)

        return send


async def _read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytearray:
    """The whole body. Raises TooLarge as soon as it is known to be, ClientLeft where it ends early."""
    too_large = TooLarge(f"the body has more than {max_bytes} bytes, the limit of this gateway")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        more = message.get("more_body", False)
    return body


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone (or, says ASGI, when the answer is complete)."""
    while (await receive())["type"] != "http.disconnect":
        pass
