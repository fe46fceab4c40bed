"""``POST /v1/chat/completions`` and ``/v1/completions`` as pure ASGI: read, check, run, answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ModelNotFound, ServeError, StageTimeout, Unavailable
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.protocol.openai.generation import GenerationRequest
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import REQUEST_ID_HEADER
from epd_serve.routing.table import InstanceTable
from epd_serve.telemetry.span import random_block
from epd_serve.types import PLURALS
from proxy.admission.control import AdmissionControl, Visit
from proxy.api.translations import Translation
from proxy.dispatch.dispatcher import Dispatcher
from proxy.dispatch.forwarding import EventSink
from proxy.dispatch.interruption import Interruption
from proxy.dispatch.job import Job
from proxy.dispatch.strands import stream_several, whole_several
from proxy.fleet.monitor import Monitor
from proxy.http.client import (
    JSON,
    Client,
    ClientLeft,
    ResponseAborted,
    TooSlow,
    send_error,
    send_json,
)
from proxy.media.loader import MediaItem, MediaLoader
from proxy.observe.log_filters import Episodes
from proxy.observe.observer import Observer
from proxy.observe.record import RequestRecord
from proxy.settings import Current

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_TRACE_ID = re.compile(r"[\x21-\x7e]{1,256}")
#: Statuses of our own, for metrics only.
CLIENT_LEFT = 499
BROKEN_OFF = 599
#: Longest time for a body to arrive.
BODY_S = 120.0
#: Larger bodies are parsed in a thread: the event loop would stand still for milliseconds.
_INLINE_BYTES = 256 * 1024
#: How long a client may take to receive why its stream breaks off.
_LAST_WORDS_S = 1.0


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """Reads and checks a request and bounds its time; :meth:`_generate` answers it."""

    kind: str
    table: InstanceTable
    monitor: Monitor
    loader: MediaLoader
    admission: AdmissionControl
    observer: Observer
    episodes: Episodes
    settings: Current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        client = Client(scope, receive, send)
        try:
            await self._serve(client)
        finally:
            client.close()

    async def _serve(self, client: Client) -> None:
        """Answer one request.

        Raises ResponseAborted for a stream that broke off, so that the connection is closed, and whatever is a
        fault of the gateway's own.
        """
        record = self.observer.begin(self.kind, client.headers)
        try:
            visit = self.admission.enter(client.headers.get(b"authorization"))
        except ServeError as error:
            await send_error(client, error, record)
            self.observer.finish(record, error.status, error)
            return
        record.key = visit.client.name
        exchange = Exchange(client, record, visit)
        try:
            await self._answer(exchange)
        finally:
            visit.leave()

    async def _answer(self, exchange: Exchange) -> None:
        client, record = exchange.client, exchange.record
        sink = EventSink(client, record, self.observer.first_token)
        limit_s = self.settings.now.gateway.request_timeout_s
        late = f"the request took longer than {limit_s:g} s, this gateway's limit"
        status, failure = 200, None
        try:
            body = await self._receive(exchange)
            with Interruption(client.loop, limit_s, partial(StageTimeout, late)) as exchange.running:
                client.on_left = exchange.on_left
                await self._generate(exchange, body, sink)
        except ClientLeft:
            status, exchange.answered = CLIENT_LEFT, True
        except ServeError as error:
            status, failure = BROKEN_OFF if sink.started else error.status, error
            is_told = isinstance(error, Unavailable) and not self.episodes.is_new(error.message)
            if error.status >= 500 and not is_told:
                logger.warning("request %s: %s", record.request_id, error.message)
            was_answered, exchange.answered = exchange.answered, True
            if was_answered or sink.ended:  # by now an error would be read as the next answer
                raise ResponseAborted(error.message) from error
            if not sink.started:
                await send_error(client, error, record)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await sink.fail(error)
            raise ResponseAborted(error.message) from error
        except Exception:
            # A fault of the gateway's own, counted as one: who serves the connection answers it or breaks it off.
            status = BROKEN_OFF if sink.started else 500
            exchange.answered = True
            raise
        finally:
            if exchange.answered:
                self.observer.finish(record, status, failure)

    async def _receive(self, exchange: Exchange) -> bytearray:
        """The body. Raises ServeError, or ClientLeft where it ends early."""
        trace_id = exchange.client.headers.get(_REQUEST_ID, b"").decode("latin-1")
        if _TRACE_ID.fullmatch(trace_id):  # any other is replaced by one of ours
            exchange.record.request_id = trace_id
        client, max_bytes = exchange.client, self.settings.now.gateway.max_body_bytes
        late = f"the body did not arrive within {BODY_S:g} s; send it faster"
        with Interruption(client.loop, BODY_S, partial(TooSlow, late)):
            return await client.body(max_bytes)

    async def _generate(self, exchange: Exchange, body: bytearray, sink: EventSink) -> None:
        """Answer a request, through ``sink`` or in one piece. Raises ServeError, even after the first byte."""
        raise NotImplementedError

    async def _media(self, exchange: Exchange, sources: list[MediaSource], salt: str = "") -> list[MediaItem]:
        info = self.table.models().get(exchange.record.model)
        for source in sources:
            if info is not None and source.modality not in info.modalities:
                raise _not_taken(info, source)
        fingerprint = "" if info is None else info.media_fingerprint
        items = await self.loader.load(sources, fingerprint, salt)
        exchange.record.media([(item.ref, len(item.data)) for item in items])
        return items

    def _model(self, wanted: str | None) -> str:
        models = self.table.models()
        if not models:
            raise Unavailable("no instance has started yet; try again shortly")
        if wanted is None:
            return next(iter(models))
        if wanted not in models:
            known = ", ".join(repr(name) for name in models)
            raise ModelNotFound(f"there is no model {wanted[:100]!r}; served here: {known}", param="model")
        return wanted


async def parse_body(parse: Callable[[bytes | bytearray], T], body: bytearray) -> T:
    """Return what ``parse`` makes of a body, and empty it."""
    parsed = parse(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse, body)
    body.clear()
    return parsed


def _not_taken(info: InstanceInfo, source: MediaSource) -> InvalidRequest:
    """Say what a model takes in place of an item."""
    if not info.modalities:
        return InvalidRequest(
            f"the model {info.model!r} takes text alone; leave out the {PLURALS[source.modality]}",
            param="messages",
        )
    taken = " and ".join(("text", *(PLURALS.get(one, one) for one in info.modalities)))
    return InvalidRequest(
        f"the model {info.model!r} takes no {PLURALS[source.modality]} here; it takes {taken}",
        param=source.param,
        code="unsupported_media",
    )


@dataclass(kw_only=True, eq=False)
class GenerationEndpoint(Endpoint):
    """An endpoint whose answer is generated. Where its API is not that of the instances, its requests are chats
    for them, and ``translation`` makes its answers."""

    parse: Callable[[bytes | bytearray], GenerationRequest]
    dispatcher: Dispatcher
    translation: Callable[[GenerationRequest, Job], Translation] | None = None

    async def _generate(self, exchange: Exchange, body: bytearray, sink: EventSink) -> None:
        request = await parse_body(self.parse, body)
        sources = request.media()
        if not self.monitor.started.is_set():
            await self.monitor.started.wait()
        model = exchange.record.model = self._model(request.model)
        num_choices = (request.n or 1) * max(1, len(request.prompts()))
        exchange.visit.check(priority=request.priority or 0, num_choices=num_choices)
        items: list[MediaItem] = []
        if sources:
            items = await self._media(exchange, sources, request.cache_salt or "")
        await exchange.admit()
        jobs = self._jobs(exchange, request, model, items)
        exchange.record.streamed = bool(request.stream)
        translation = None if self.translation is None else self.translation(request, jobs[0])
        if request.stream:
            if translation is not None:
                sink.outlet = translation.over(exchange.client)
            if len(jobs) == 1:
                await self.dispatcher.stream(jobs[0], sink)
            else:
                await stream_several(self.dispatcher, jobs, sink)
            exchange.answered = True
            if not sink.is_out:
                await sink.finish()
        else:
            if len(jobs) == 1:
                answer = await self.dispatcher.whole(jobs[0])
            else:
                answer = await whole_several(self.dispatcher, jobs)
            exchange.record.answered(answer)
            content_type = JSON
            if translation is not None:
                answer, content_type = translation.whole(answer), translation.content_type
            exchange.answered = True
            await send_json(exchange.client, 200, answer, exchange.record, content_type=content_type)

    def _jobs(
        self, exchange: Exchange, request: GenerationRequest, model: str, items: list[MediaItem]
    ) -> list[Job]:
        """One job for each of the request's prompts."""
        answer_id = random_block().hex()
        output = request.output(id=answer_id, created=int(time.time()), model=model)
        chat = request.chat()
        prompts: Sequence[str | list[int] | None] = request.prompts() if chat is None else [None]
        return [
            Job(
                id=answer_id if index == 0 else random_block().hex(),
                trace_id=exchange.record.request_id,
                record=exchange.record,
                model=model,
                output=output if index == 0 else replace(output, first_index=index * (request.n or 1)),
                sampling=request.sampling(int.from_bytes(random_block()[:8]) >> 1),
                prompting=request.prompting(),
                loop=exchange.client.loop,
                messages=chat,
                prompt=prompt,
                items=items,
            )
            for index, prompt in enumerate(prompts)
        ]


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer.

    Attributes:
        record: what is noted of it.
        visit: its place in the queue.
        answered: the last word is on its way; a client that leaves from now on has left nothing.
        running: ends the answer.
    """

    client: Client
    record: RequestRecord
    visit: Visit
    answered: bool = False
    running: Interruption | None = None

    async def admit(self) -> None:
        """Return when the request may run. Raises Overloaded where its turn does not come in time."""
        since_s = time.monotonic()
        if await self.visit.admit():
            self.record.queued(since_s)

    def on_left(self) -> None:
        """The client is gone."""
        if not self.answered and self.running is not None:
            self.running.fire(ClientLeft())
