"""Endpoints with a request body, as ASGI applications: read, check, admit, serve."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InstanceLost, InvalidRequest, ModelNotFound, ServeError, StageTimeout, Unavailable
from epd_serve.protocol.openai.generation import GenerationRequest
from epd_serve.protocol.openai.tokenizing import TokenQuestion
from epd_serve.protocol.openai.translated import AnswerTranslation, TranslatedChat
from epd_serve.protocol.wire import REQUEST_ID_HEADER, DetokenizeReply, DetokenizeRequest, MediaRef, TokenizeReply
from epd_serve.routing.retry import LOOK_AGAIN_S, is_planned
from epd_serve.types import PLURALS, Stage
from proxy.admission import Visit
from proxy.gateway import Gateway
from proxy.http.client import Client, ClientLeft, ResponseAborted, TooSlow, headers_of
from proxy.media.loader import MediaItem
from proxy.observe.record import RequestRecord
from proxy.serving.forwarding import EventSink
from proxy.serving.job import Job
from proxy.serving.prompts import stream_several, whole_several
from proxy.serving.serve import serve_stream, serve_whole
from proxy.tasks import Interruption, drop_tracebacks

logger = logging.getLogger(__name__)

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_TRACE_ID = re.compile(r"[\x21-\x7e]{1,256}")
#: Internal statuses for metrics: the client disconnected; the answer broke off after its first byte.
CLIENT_LEFT = 499
BROKEN_OFF = 599
#: Longest time for a body to arrive.
BODY_S = 120.0
#: Larger bodies are parsed in a thread. For smaller ones, about a millisecond per megabyte, a thread takes longer.
_INLINE_BYTES = 2 * 1024**2
#: Time for a client to receive the error that ends its stream.
_LAST_WORDS_S = 1.0


class Endpoint:
    """Reads a request within time limits; :meth:`_generate` checks and answers it."""

    def __init__(self, gateway: Gateway, kind: str, parse: Callable[[bytes | bytearray], Any]) -> None:
        self.gateway = gateway
        self.kind = kind
        self.parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises ResponseAborted for a broken stream, so that the server closes the connection, and internal errors.
        """
        gateway = self.gateway
        record = gateway.observer.begin(self.kind, headers := headers_of(scope))
        client = Client(headers, receive, send, record)
        try:
            holder = gateway.admission.authenticator.check(
                headers.get(b"authorization"), headers.get(b"x-api-key")
            )
            record.key = holder.name
            holder.enter()
            visit = Visit(holder, gateway.admission.queue)
        except ServeError as error:
            await client.send_error(error)
            gateway.observer.finish(record, error.status, error)
            return
        try:
            await self._answer(client, visit)
        finally:
            visit.leave()
            client.close()

    async def _answer(self, client: Client, visit: Visit) -> None:
        record, gateway = client.record, self.gateway.settings.gateway
        request_id = client.headers.get(_REQUEST_ID, b"").decode("latin-1")
        if _TRACE_ID.fullmatch(request_id):  # else keep the generated one
            record.request_id = request_id
        sink, status, failure = EventSink(client, record), 200, None
        limit_s = gateway.request_timeout_s
        late = f"the request took longer than {limit_s:g} s, this gateway's limit"
        late_body = f"the body did not arrive within {BODY_S:g} s; send it faster"
        try:
            with Interruption(client.loop, BODY_S, partial(TooSlow, late_body)):
                body = await client.body(gateway.max_body_bytes)
            with Interruption(client.loop, limit_s, partial(StageTimeout, late)) as client.running:
                await self._generate(client, visit, body, sink)
        except ClientLeft as error:
            drop_tracebacks(error)
            status, client.answered = CLIENT_LEFT, True
        except ServeError as error:
            drop_tracebacks(error)
            status, failure = BROKEN_OFF if sink.started else error.status, error
            if error.status >= 500:  # the log filter groups by this text
                logger.warning(error.message.replace("%", "%%") + " (request %s)", record.request_id)
            was_answered, client.answered = client.answered, True
            if was_answered or sink.ended:  # the client would read an error as the next answer
                raise ResponseAborted(error.message) from error
            if not sink.started:
                await client.send_error(error)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await sink.fail(error)
            raise ResponseAborted(error.message) from error
        except Exception:  # internal error: the server answers or aborts
            status = BROKEN_OFF if sink.started else 500
            client.answered = True
            raise
        finally:
            if client.answered:
                self.gateway.observer.finish(record, status, failure)

    async def _generate(self, client: Client, visit: Visit, body: bytearray, sink: EventSink) -> None:
        """Answer a request through ``sink`` or as a whole. Raises ServeError, even after the first byte."""
        raise NotImplementedError

    async def _parse(self, body: bytearray) -> Any:
        """Parse a body and clear it."""
        parsed = self.parse(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(self.parse, body)
        body.clear()
        return parsed

    async def _prepare(
        self,
        record: RequestRecord,
        visit: Visit,
        request: Any,
        *,
        priority: int = 0,
        num_choices: int = 1,
        salt: str = "",
    ) -> list[MediaItem]:
        """Load the media of a checked request and wait until it may run."""
        record.model = await self._model(request.model)
        visit.check(priority=priority, num_choices=num_choices)
        items: list[MediaItem] = []
        if sources := request.media():
            info = self.gateway.fleet.table.models()[record.model]
            for source in sources:
                if source.modality not in info.modalities:
                    taken = " and ".join(("text", *(PLURALS.get(one, one) for one in info.modalities)))
                    raise InvalidRequest(
                        f"model {info.model!r} accepts no {PLURALS[source.modality]}; it accepts {taken}",
                        param=source.param if info.modalities else "messages",
                        code="unsupported_media" if info.modalities else None,
                    )
            items = await self.gateway.loader.load(sources, salt)
            record.media([(item.ref, len(item.data)) for item in items])
        since_s = time.monotonic()
        if await visit.admit():
            record.queued(since_s)
        return items

    async def _model(self, wanted: str | None) -> str:
        fleet = self.gateway.fleet
        if not fleet.started.is_set():
            await fleet.started.wait()
        models = fleet.table.models()
        if not models:
            raise Unavailable("no instance has started yet; try again shortly")
        if wanted is None:
            return next(iter(models))
        if wanted not in models:
            known = ", ".join(repr(name) for name in models)
            raise ModelNotFound(f"no model {wanted[:100]!r}; served here: {known}", param="model")
        return wanted


class GenerationEndpoint(Endpoint):
    """An endpoint with a generated answer."""

    async def _generate(self, client: Client, visit: Visit, body: bytearray, sink: EventSink) -> None:
        request: GenerationRequest = await self._parse(body)
        record, fleet = client.record, self.gateway.fleet
        items = await self._prepare(
            record,
            visit,
            request,
            priority=request.priority or 0,
            num_choices=(request.n or 1) * max(1, len(request.prompts())),
            salt=request.cache_salt or "",
        )
        jobs = self._jobs(client, request, items)
        record.streamed = bool(request.stream)
        output = jobs[0].output
        translation = None
        if isinstance(request, TranslatedChat):
            translation = request.translation(id=jobs[0].id, created=output.created, model=record.model)
        if request.stream:
            if translation is not None:
                sink.outlet = TranslatedOutlet(client, translation)
            if len(jobs) == 1:
                await serve_stream(fleet, jobs[0], sink)
            else:
                await stream_several(fleet, jobs, sink)
            client.answered = True
            await sink.finish()
            return
        answer = await (serve_whole(fleet, jobs[0]) if len(jobs) == 1 else whole_several(fleet, jobs))
        record.forwarded(answer)
        record.end_answer(None)
        client.answered = True
        if translation is None:
            await client.send_json(200, answer)
        else:
            await client.send_json(200, translation.whole(answer), content_type=translation.content_type)

    def _jobs(self, client: Client, request: GenerationRequest, items: list[MediaItem]) -> list[Job]:
        """Return one job per prompt."""
        answer_id, record = os.urandom(16).hex(), client.record
        output = request.output(id=answer_id, created=int(time.time()), model=record.model)
        chat = request.chat()
        prompts: Sequence[str | list[int] | None] = request.prompts() if chat is None else [None]
        return [
            Job(
                id=answer_id if index == 0 else os.urandom(16).hex(),
                record=record,
                output=output if index == 0 else replace(output, first_index=index * (request.n or 1)),
                sampling=request.sampling(int.from_bytes(os.urandom(8)) >> 1),
                prompting=request.prompting(),
                loop=client.loop,
                messages=chat,
                prompt=prompt,
                items=items,
            )
            for index, prompt in enumerate(prompts)
        ]


class TranslatedOutlet:
    """An Outlet that translates chat events into another API's."""

    def __init__(self, client: Client, translation: AnswerTranslation) -> None:
        self.start, self.drain = client.start, client.drain
        self._client = client
        self._translation = translation

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = [event.removeprefix(b"data: ") for event in bytes(data).split(b"\n\n") if event]
        body = b"".join(map(self._translation.events, events))
        return self._client.write(body, last=last) if body or last else True


class TokenizingEndpoint(Endpoint):
    """``/tokenize``, ``/detokenize`` and the counts of tokens: a prefill instance answers."""

    async def _generate(self, client: Client, visit: Visit, body: bytearray, sink: EventSink) -> None:
        request: TokenQuestion = await self._parse(body)
        items = await self._prepare(client.record, visit, request)
        answer = await self._ask(request, [item.ref for item in items], client.record)
        client.answered = True
        await client.send_json(200, answer)

    async def _ask(self, request: TokenQuestion, refs: list[MediaRef], record: RequestRecord) -> bytes:
        """Ask the least loaded prefill instance; wait for one as chats do."""
        fleet, trace_id = self.gateway.fleet, record.request_id
        message, lost = request.message(refs), None
        reply: TokenizeReply | DetokenizeReply
        while True:
            for one in sorted(fleet.table.ready(Stage.PREFILL, record.model), key=lambda one: one.prefill_s):
                calls = fleet.calls.get(one.name)
                if calls is None:
                    continue
                assert one.info is not None, "a ready instance has sent its info"
                try:
                    if isinstance(message, DetokenizeRequest):
                        reply = await calls.detokenize(message, trace_id=trace_id)
                    else:
                        reply = await calls.tokenize(message, trace_id=trace_id)
                    answer = request.answer(reply, one.info.max_model_len)
                    return (await asyncio.to_thread(answer.model_dump_json)).encode()
                except InstanceLost as error:
                    fleet.report_lost(one.name)
                    lost = error
                except Unavailable as error:
                    if not is_planned(error):
                        raise
            if lost is not None or not fleet.is_awaited:
                raise lost or Unavailable("no prefill instance is ready; try again shortly")
            await asyncio.sleep(LOOK_AGAIN_S)
