"""``POST /v1/chat/completions`` and ``/v1/completions`` as pure ASGI: read, check, run, answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ModelNotFound, ServeError, StageTimeout, Unavailable
from epd_serve.metrics.gateway import GatewayMetrics
from epd_serve.protocol.messages import MediaSource
from epd_serve.protocol.openai import GenerationRequest
from epd_serve.protocol.wire import REQUEST_ID_HEADER
from epd_serve.randomness import random_block
from epd_serve.routing.table import InstanceTable
from proxy.arrival import ArrivalLimits
from proxy.attempt import Job
from proxy.client import Client, ClientLeft, SendOutlet, client_of, headers_of
from proxy.gate import Gate, Visit
from proxy.generation import Generator
from proxy.interruption import TimeLimit
from proxy.limits import BYTES_PER_TOKEN, estimate_tokens
from proxy.media import MediaItem, MediaLoader
from proxy.observer import Observer
from proxy.payloads import ParsedBody
from proxy.poller import Poller
from proxy.several import stream_several, whole_several
from proxy.sink import EventSink, ResponseAborted, send_error, send_json
from proxy.trail import Trail

logger = logging.getLogger(__name__)

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_TRACE_ID = re.compile(r"[\x21-\x7e]{1,256}")
#: Statuses of our own, for metrics only.
CLIENT_LEFT = 499
BROKEN_OFF = 599
#: How long a client may take to receive why its stream breaks off.
_LAST_WORDS_S = 1.0


def new_id() -> str:
    return random_block().hex()


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
        self.reconfigure(max_body_bytes=max_body_bytes, timeout_s=timeout_s)

    def reconfigure(self, *, max_body_bytes: int, timeout_s: float) -> None:
        """For the next requests."""
        self.max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._too_long = f"the request took longer than {timeout_s:g} s, this gateway's limit"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, headers = client_of(scope, receive, send), headers_of(scope)
        exchange = Exchange(headers, client, send, self._observer.begin(self._kind, headers))
        try:
            visit = self._gate.enter(exchange.headers.get(b"authorization"))
        except ServeError as error:
            await send_error(send, error, exchange.trail)
            self._count(exchange, error.status, error)
            return
        exchange.trail.key = visit.client.name
        try:
            await self._serve(exchange, visit)
        finally:
            client.close()
            visit.leave()

    async def _serve(self, exchange: Exchange, visit: Visit) -> None:
        try:
            body = await self._receive(exchange)
        except ServeError as error:
            await send_error(exchange.send, error, exchange.trail)
            self._count(exchange, error.status, error)
            return
        except ClientLeft:
            self._count(exchange, CLIENT_LEFT)
            return
        task = asyncio.current_task(exchange.client.loop)
        assert task is not None
        left = False

        def leave() -> None:
            nonlocal left
            if not exchange.answered:
                left = True
                task.cancel()

        exchange.client.watch(leave)
        try:
            await self._answer(exchange, visit, body)
        except asyncio.CancelledError:
            if not left or task.uncancel():
                raise
            self._count(exchange, CLIENT_LEFT)

    async def _receive(self, exchange: Exchange) -> bytearray:
        given = exchange.headers.get(_REQUEST_ID)
        if given:
            trace_id = given.decode("latin-1")
            if not _TRACE_ID.fullmatch(trace_id):
                raise InvalidRequest(
                    f"the header {REQUEST_ID_HEADER} takes 1 to 256 printable ASCII characters without spaces",
                    param=REQUEST_ID_HEADER,
                )
            exchange.trail.request_id = trace_id
        client = exchange.client
        if client.has_body:
            return await client.body(self.max_body_bytes)
        length = exchange.headers.get(b"content-length", b"")
        declared = int(length) if length.isdigit() else None
        limit_s, reason = self._arrival.time_for_body(declared), self._arrival.too_slow(declared)
        with TimeLimit(client.loop, limit_s, reason):
            return await client.body(self.max_body_bytes)

    async def _answer(self, exchange: Exchange, visit: Visit, body: bytearray) -> None:
        sink = EventSink(exchange.client, exchange.trail, lambda: self._first_token(exchange))
        status, failure = 200, None
        try:
            with TimeLimit(exchange.client.loop, self._timeout_s, StageTimeout(self._too_long)):
                await self._generate(exchange, visit, body, sink)
        except ServeError as error:
            status, failure = BROKEN_OFF if sink.started else error.status, error
            if error.status >= 500:
                logger.warning("request %s: %s", exchange.trail.request_id, error.message)
            if exchange.answered or sink.ended:  # by now an error would be read as the next answer
                exchange.answered = True
                raise ResponseAborted(error.message) from error
            exchange.answered = True
            if not sink.started:
                await send_error(exchange.send, error, exchange.trail)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
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
        items = await self._loader.load(sources)
        exchange.trail.media([one.width * one.height for one in items], sum([len(item.data) for item in items]))
        self._metrics.media_bytes.add(exchange.trail.media_bytes, "image")
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
        self, *, parse: Callable[[bytes | bytearray], GenerationRequest], generator: Generator, **shared: Any
    ) -> None:
        super().__init__(**shared)
        self._parse = parse
        self._generator = generator

    async def _generate(self, exchange: Exchange, visit: Visit, body: bytearray, sink: EventSink) -> None:
        parsed = ParsedBody(self._parse, body)
        request = parsed.request
        await self._poller.started()
        model = exchange.trail.model = self._model(request.model)
        num_choices = (request.n or 1) * max(1, len(request.prompts()))
        num_tokens = estimate_tokens(parsed.text_bytes, request.token_limit(), num_choices)
        waiting = visit.admit(
            priority=request.priority or 0,
            num_tokens=num_tokens,
            num_prompt_tokens=parsed.text_bytes // BYTES_PER_TOKEN,
            has_media=parsed.has_media,
        )
        if waiting is not None:
            since_s = time.monotonic()
            await waiting
            exchange.trail.queued(since_s)
        items: list[MediaItem] = []
        if parsed.has_media:
            items = await parsed.load(lambda sources: self._media(exchange, sources))
        jobs = self._jobs(exchange, request, model, items)
        exchange.trail.streamed = bool(request.stream)
        if request.stream:
            translation = self._translation(request, jobs[0], exchange.send)
            if translation is not exchange.send:
                sink.redirect(SendOutlet(translation))
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
        answer_id = new_id()
        output = request.output(id=answer_id, created=int(time.time()), model=model)
        chat = request.chat()
        prompts: Sequence[str | list[int] | None] = request.prompts() if chat is None else [None]
        return [
            Job(
                id=answer_id if index == 0 else new_id(),
                trace_id=exchange.trail.request_id,
                trail=exchange.trail,
                model=model,
                output=output if index == 0 else replace(output, first_index=index * (request.n or 1)),
                sampling=request.sampling(int.from_bytes(random_block()[:8]) >> 1),
                prompting=request.prompting(),
                loop=exchange.client.loop,
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
        client: of a streamed answer; ``send`` is for one in one piece.
        answered: the last word is on its way; a client that leaves from now on has left nothing.
        trail: what is noted of it.
    """

    def __init__(self, headers: dict[bytes, bytes], client: Client, send: Send, trail: Trail) -> None:
        self.headers = headers
        self.client = client
        self.send = send
        self.trail = trail
        self.answered = False
