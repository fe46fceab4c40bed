"""Endpoints that take a body, as pure ASGI: read, check, run, answer."""

from __future__ import annotations

import asyncio
import logging
import os
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
from epd_serve.protocol.openai.generation import GenerationRequest, Translation
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import REQUEST_ID_HEADER
from epd_serve.routing.table import InstanceTable
from epd_serve.types import PLURALS
from proxy.admission.control import AdmissionControl, Visit
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
from proxy.observe.observer import Observer
from proxy.observe.record import RequestRecord
from proxy.serving.forwarding import EventSink
from proxy.serving.interruption import Interruption
from proxy.serving.job import Instances, Job
from proxy.serving.prompts import stream_several, whole_several
from proxy.serving.serve import serve_stream, serve_whole
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_TRACE_ID = re.compile(r"[\x21-\x7e]{1,256}")
#: Statuses of the gateway's own, for metrics only.
CLIENT_LEFT = 499
BROKEN_OFF = 599
#: Longest time for a body to arrive.
BODY_S = 120.0
#: Larger bodies are parsed in a thread, which would block the event loop for milliseconds.
_INLINE_BYTES = 256 * 1024
#: Time for a client to receive the error that breaks off its stream.
_LAST_WORDS_S = 1.0


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """Reads a request and bounds its time; :meth:`_generate` checks and answers it."""

    kind: str
    table: InstanceTable
    monitor: Monitor
    loader: MediaLoader
    admission: AdmissionControl
    observer: Observer
    settings: GatewaySettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application.

        Raises ResponseAborted for a stream that broke off, so that the connection is closed, and any fault of the
        gateway's own.
        """
        client = Client(scope, receive, send)
        record = self.observer.begin(self.kind, client.headers)
        try:
            holder = self.admission.authenticator.check(client.headers.get(b"authorization"))
            record.key = holder.name
            visit = self.admission.enter(holder)
        except ServeError as error:
            await send_error(client, error, record)
            self.observer.finish(record, error.status, error)
            return
        try:
            await self._answer(Exchange(client, record, visit))
        finally:
            visit.leave()
            client.close()

    async def _answer(self, exchange: Exchange) -> None:
        client, record, gateway = exchange.client, exchange.record, self.settings.gateway
        request_id = client.headers.get(_REQUEST_ID, b"").decode("latin-1")
        if _TRACE_ID.fullmatch(request_id):  # any other is replaced by ours
            record.request_id = request_id
        sink, status, failure = EventSink(client, record), 200, None
        limit_s = gateway.request_timeout_s
        late = f"the request took longer than {limit_s:g} s, this gateway's limit"
        late_body = f"the body did not arrive within {BODY_S:g} s; send it faster"
        try:
            with Interruption(client.loop, BODY_S, partial(TooSlow, late_body)):
                body = await client.body(gateway.max_body_bytes)
            with Interruption(client.loop, limit_s, partial(StageTimeout, late)) as exchange.running:
                client.on_left = exchange.on_left
                await self._generate(exchange, body, sink)
        except ClientLeft:
            status, exchange.answered = CLIENT_LEFT, True
        except ServeError as error:
            status, failure = BROKEN_OFF if sink.started else error.status, error
            if error.status >= 500:  # the text is the key of the log's filter
                logger.warning(error.message.replace("%", "%%") + " (request %s)", record.request_id)
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
        except Exception:  # a fault of the gateway: the server answers it or breaks off
            status = BROKEN_OFF if sink.started else 500
            exchange.answered = True
            raise
        finally:
            if exchange.answered:
                self.observer.finish(record, status, failure)

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
    """Parse a body, and empty it."""
    parsed = parse(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse, body)
    body.clear()
    return parsed


def _not_taken(info: InstanceInfo, source: MediaSource) -> InvalidRequest:
    """Return the error for an item that the model does not take."""
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
    """An endpoint whose answer is generated."""

    parse: Callable[[bytes | bytearray], GenerationRequest]
    instances: Instances

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
        output = jobs[0].output
        translation = request.translation(id=jobs[0].id, created=output.created, model=model)
        if request.stream:
            if translation is not None:
                sink.outlet = TranslatedOutlet(exchange.client, translation)
            if len(jobs) == 1:
                await serve_stream(self.instances, jobs[0], sink)
            else:
                await stream_several(self.instances, jobs, sink)
            exchange.answered = True
            if not sink.is_out:
                await sink.finish()
        else:
            if len(jobs) == 1:
                answer = await serve_whole(self.instances, jobs[0])
            else:
                answer = await whole_several(self.instances, jobs)
            exchange.record.answered(answer)
            content_type = JSON if translation is None else translation.content_type
            if translation is not None:
                answer = translation.whole(answer)
            exchange.answered = True
            await send_json(exchange.client, 200, answer, exchange.record, content_type=content_type)

    def _jobs(
        self, exchange: Exchange, request: GenerationRequest, model: str, items: list[MediaItem]
    ) -> list[Job]:
        """Return a job for each of the request's prompts."""
        answer_id = os.urandom(16).hex()
        output = request.output(id=answer_id, created=int(time.time()), model=model)
        chat = request.chat()
        prompts: Sequence[str | list[int] | None] = request.prompts() if chat is None else [None]
        return [
            Job(
                id=answer_id if index == 0 else os.urandom(16).hex(),
                trace_id=exchange.record.request_id,
                record=exchange.record,
                model=model,
                output=output if index == 0 else replace(output, first_index=index * (request.n or 1)),
                sampling=request.sampling(int.from_bytes(os.urandom(8)) >> 1),
                prompting=request.prompting(),
                loop=exchange.client.loop,
                messages=chat,
                prompt=prompt,
                items=items,
            )
            for index, prompt in enumerate(prompts)
        ]


class TranslatedOutlet:
    """Translates whole events of a chat on their way to the client."""

    def __init__(self, client: Client, translation: Translation) -> None:
        self.start, self.drain = client.start, client.drain
        self._client = client
        self._translation = translation

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = [event.removeprefix(b"data: ") for event in bytes(data).split(b"\n\n") if event]
        body = b"".join(map(self._translation.events, events))
        return self._client.write(body, last=last) if body or last else True


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer.

    Attributes:
        answered: the end of the answer is on its way; a client that leaves now misses nothing.
        running: interrupts the answer.
    """

    client: Client
    record: RequestRecord
    visit: Visit
    answered: bool = False
    running: Interruption | None = None

    async def admit(self) -> None:
        """Wait until the request may run. Raises Overloaded where its turn does not come in time."""
        since_s = time.monotonic()
        if await self.visit.admit():
            self.record.queued(since_s)

    def on_left(self) -> None:
        """Interrupt the answer: the client is gone."""
        if not self.answered and self.running is not None:
            self.running.fire(ClientLeft())
