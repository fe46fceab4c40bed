"""One coroutine per request: pick instances, call them at once, forward their answers, retry after a failure."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from epd_serve.backends.base import Answer, StageCall
from epd_serve.errors import REQUEST_ENDED, InstanceFailed, InstanceLost, ServeError
from epd_serve.protocol.wire import DecodeRequest, EncodeRequest, MediaRef, PrefillRequest
from epd_serve.routing.encoders import choose_encoders, split_videos
from epd_serve.routing.retry import (
    EXPLAIN_S,
    LOOK_AGAIN_S,
    CallFailed,
    ItemEncoders,
    Retry,
    explains,
    is_planned,
)
from epd_serve.routing.routes import Route
from epd_serve.routing.table import InstanceRecord, OpenCall
from epd_serve.telemetry.span import Span
from epd_serve.types import Stage
from proxy.fleet import Fleet
from proxy.observe.record import DECODE, ENCODE, ENCODED, PREFILL, RECOMPUTED, STORED, TRANSFER
from proxy.serving.forwarding import EventSink, Streamed, Whole
from proxy.serving.job import Job, measure_demand
from proxy.tasks import Interruption, drop_tracebacks

_P, _D = Stage.PREFILL, Stage.DECODE


async def serve_stream(fleet: Fleet, job: Job, sink: EventSink) -> None:
    """Write the answer's events to ``sink``. Raises ServeError, before or after ``sink.started``."""
    answer = Streamed(job, sink)
    try:
        await _serve(fleet, job, answer)
    finally:
        readers = answer.readers if answer.known else []
        job.record.end_answer(sum([len(one.tokens) for one in readers]) if readers else None)


async def serve_whole(fleet: Fleet, job: Job) -> bytes:
    """Return the answer's JSON. Raises ServeError."""
    answer = Whole(job)
    await _serve(fleet, job, answer)
    return answer.body


async def _serve(fleet: Fleet, job: Job, answer: Streamed | Whole) -> None:
    """Make attempts until the client has the whole answer; raise the last one's ServeError.

    Cancelling the task closes all calls.
    """
    record, number = job.record, 0
    retry = Retry(fleet.table, fleet.policy, job.output.model, await measure_demand(fleet, job))
    while True:
        route = retry.pick_route(job.loop.time(), fleet.wait_s, fleet.complete_at_s)
        if route is None:
            await asyncio.sleep(LOOK_AGAIN_S)
            continue
        number += 1
        if number > 1:
            if retry.generated:
                record.continuations += 1
            else:
                record.retries += 1
        assert route.prefill.info is not None, "a ready instance has sent its info"
        fingerprint = route.prefill.info.media_fingerprint
        refs = [await item.name(fingerprint) for item in job.items]
        attempt = _Attempt(fleet, job, route, f"{job.id}-{number}", Interruption(job.loop))
        fleet.watchers.add(attempt)
        try:
            with attempt.interruption:
                attempt.call_instances(refs, retry.generated, again=number > 1)
                await attempt.forward_answers(answer)
            return
        except CallFailed as failure:
            drop_tracebacks(failure)
            drop_tracebacks(failure.error)
            if answer.complete:
                return
            retry.fail_attempt(route, failure, begun=answer.begun, generated=answer.generated())
            for span in record.spans:
                if span.request_id == attempt.request_id:
                    span.end(failed=True)
        finally:
            fleet.watchers.discard(attempt)
            await attempt.close()


class _Attempt(Struct, eq=False):
    """One attempt: concurrent calls to P, D and the encoders.

    Attributes:
        interruption: ends the attempt when a call fails that the coroutine is not waiting for.
    """

    fleet: Fleet
    job: Job
    route: Route
    request_id: str
    interruption: Interruption
    _calls: dict[Stage, tuple[StageCall, OpenCall]] = {}  # of P and D
    _encodes: list[asyncio.Task[None]] = []
    _encode_calls: dict[Interruption, str] = {}  # the encoder of each open call
    _span: Span | None = None  # of the current stage of P or D
    _is_with_decode: bool = False  # D's answer has begun; P is no longer needed

    def call_instances(self, refs: list[MediaRef], generated: list[int], *, again: bool) -> None:
        """Start all calls at once; P does not wait for E. Raises CallFailed."""
        fleet, job, route, record = self.fleet, self.job, self.route, self.job.record
        for stage, one in ((_P, route.prefill), (_D, route.decode)):
            if one.name not in fleet.calls:
                raise self._failure(stage, _left(one))
        prefill, decode = fleet.calls[route.prefill.name], fleet.calls[route.decode.name]
        if any(ref.modality == "video" for ref in refs):
            refs = split_videos(fleet.table, route.prefill, refs, [len(item.data) for item in job.items])
        parts = [(place, part) for place, ref in enumerate(refs) for part in ref.segments]
        record.items = [part.mm_hash for _, part in parts]
        self._begin_span(PREFILL, route.prefill)
        assert self._span is not None
        request = PrefillRequest(
            request_id=self.request_id,
            output=job.output,
            sampling=job.sampling,
            items=refs,
            messages=job.messages,
            prompt=job.prompt,
            prompting=job.prompting,
            decode_url=None if route.fused else decode.url,
            max_model_len=route.max_model_len,
            generated=generated,
            traceparent=self._traceparent(self._span),
        )
        media = [item.data for item in job.items]
        self._count_call(_P, prefill.prefill(request, trace_id=job.record.request_id, media=media), again=again)
        if not route.fused:
            expected = DecodeRequest(
                request_id=self.request_id, stream=job.output.stream, traceparent=record.traceparent
            )
            try:
                call = decode.decode(expected, trace_id=job.record.request_id)
            except ServeError as error:
                raise self._failure(_D, error) from error
            self._count_call(_D, call, again=again)
            call.opened.add_done_callback(self._decode_opened)
        distinct = {part.mm_hash: (place, part) for place, part in parts}
        if not distinct:
            return
        items = [part for _, part in distinct.values()]
        encoders = choose_encoders(fleet.table, route.prefill, items)
        for (place, part), encoder in zip(distinct.values(), encoders, strict=True):
            item = ItemEncoders(part, job.items[place].param, encoder)
            encode = self._encode(item, job.items[place].data, prefill.url)
            self._encodes.append(job.loop.create_task(encode))

    async def forward_answers(self, answer: Streamed | Whole) -> None:
        """Forward P's answer, then D's, to the client. Raises CallFailed."""
        route, record, (prefill, _) = self.route, self.job.record, self._calls[_P]
        try:
            opened = await prefill.opened
        except ServeError as error:
            raise await self._explain(error, may_ask=error.code == REQUEST_ENDED) from error
        follows = opened.decode_follows
        record.prompt_note = opened.prompt_note or record.prompt_note
        if follows and not route.fused:
            self._begin_span(TRANSFER, route.decode)
        else:
            self._begin_span(DECODE, route.prefill)
            self._close_call(_D)  # P answers completely
        try:
            await answer.forward(_P, route, opened)
        except InstanceLost as error:
            raise await self._explain(error, may_ask=True) from error
        if not follows:
            self._check_complete(answer, _P)
            return
        if route.fused:
            problem = f"instance {route.prefill.name} handed over to D, but the route has none"
            raise CallFailed(_P, InstanceFailed(problem), began=True)
        self._begin_span(DECODE, route.decode)
        try:
            opened = await self._calls[_D][0].opened
        except ServeError as error:
            raise self._failure(_D, error) from error
        self._is_with_decode = True
        try:
            await answer.forward(_D, route, opened)
        except InstanceLost as error:
            raise self._failure(_D, error) from error
        self._check_complete(answer, _D)

    async def close(self) -> None:
        """Close all calls and wait until none counts as in flight."""
        encodes = [task for task in self._encodes if not task.done()]
        for task in encodes:
            task.cancel()
        for stage in list(self._calls):
            self._close_call(stage)
        if encodes:
            await asyncio.wait(encodes)
        self._encodes.clear()  # their exceptions refer to this attempt: a reference cycle

    def lose_instance(self, name: str) -> None:
        """Abandon an instance that does not answer, even if its connections are open."""
        lost = InstanceLost(f"instance {name} has stopped answering")
        for encode, encoder in list(self._encode_calls.items()):
            if encoder == name:
                encode.fire(lost)
        if name == self.route.decode.name:
            self.interruption.fire(CallFailed(_D, lost))
        elif name == self.route.prefill.name and not self._is_with_decode:
            self.interruption.fire(CallFailed(_P, lost))

    # ------------------------------------------------------------------ P and D

    def _count_call(self, stage: Stage, call: StageCall, *, again: bool) -> None:
        """Count a call as in flight until it closes."""
        route, is_prefill = self.route, stage is _P
        counted = self.fleet.table.open_call(
            route.at(stage),
            stage,
            request_id=self.request_id,
            work=route.prefill_work if is_prefill else route.decode_work,
            prefix=route.prefix if is_prefill else (),
            again=again,
        )
        self._calls[stage] = call, counted

    def _close_call(self, stage: Stage) -> None:
        if (entry := self._calls.pop(stage, None)) is not None:
            call, counted = entry
            try:
                call.close()
            finally:
                counted.close()

    def _decode_opened(self, opened: asyncio.Future[Answer]) -> None:
        """End the attempt if D refuses the request before P's answer begins; later, the coroutine handles it."""
        if opened.cancelled() or _P not in self._calls or self._calls[_P][0].opened.done():
            return
        if isinstance(error := opened.exception(), ServeError):
            self.interruption.fire(self._failure(_D, error))
        elif isinstance(error, Exception):
            self.interruption.fire(error)

    async def _explain(self, error: ServeError, *, may_ask: bool) -> CallFailed:
        """Return the failure of P's call, or of D's if D caused it."""
        if may_ask and _D in self._calls:
            opened = self._calls[_D][0].opened
            await asyncio.wait([opened], timeout=EXPLAIN_S)
            cause = opened.exception() if opened.done() and not opened.cancelled() else None
            if isinstance(cause, ServeError) and explains(cause, error):
                return self._failure(_D, cause)
        return self._failure(_P, error)

    def _failure(self, stage: Stage, error: ServeError) -> CallFailed:
        """Return the failure of a call; report an instance whose connection broke."""
        if isinstance(error, InstanceLost):
            self.fleet.report_lost(self.route.at(stage).name)
        return CallFailed(stage, error)

    def _check_complete(self, answer: Streamed | Whole, stage: Stage) -> None:
        if not answer.complete:
            name = self.route.at(stage).name
            early = InstanceFailed(f"instance {name} ended an incomplete answer")
            raise CallFailed(stage, early, began=True)

    def _begin_span(self, stage: str, instance: InstanceRecord) -> None:
        """End the current span of P or D and begin the next."""
        if self._span is not None:
            self._span.end()
        self._span = self.job.record.begin(stage, self.request_id, instance.name)

    def _traceparent(self, span: Span) -> str:
        record = self.job.record
        if not record.context.sampled:
            return record.traceparent
        return record.context.child(1 + record.spans.index(span)).traceparent

    # ------------------------------------------------------------------ encoders

    async def _encode(self, item: ItemEncoders, media: bytes, announce_to: str) -> None:
        """Have an item encoded, retrying at other instances; end the attempt if all fail."""
        fleet, route = self.fleet, self.route
        try:
            while True:
                try:
                    await self._call_encoder(item, media, announce_to)
                    return
                except ServeError as error:
                    if isinstance(error, InstanceLost):
                        fleet.report_lost(item.encoder.name)
                    item.pick_next(fleet.table, route.prefill, error)
                    self.job.record.encode_retries += 1
        except ServeError as error:
            if _P in self._calls and not self._calls[_P][0].opened.done():  # else P needs no features
                self.interruption.fire(CallFailed(_P, error) if is_planned(error) else error)
        except Exception as error:  # noqa: BLE001 - internal error, raised in the request's task
            self.interruption.fire(error)

    async def _call_encoder(self, item: ItemEncoders, media: bytes, announce_to: str) -> None:
        """Call the item's current encoder. Raises ServeError."""
        fleet, job, encoder = self.fleet, self.job, item.encoder
        span = job.record.begin(ENCODE, self.request_id, encoder.name, item.ref.mm_hash)
        request = EncodeRequest(
            request_id=self.request_id,
            ref=item.ref,
            media=media,
            announce_to=announce_to,
            traceparent=self._traceparent(span),
        )
        interruption = Interruption(job.loop)
        try:
            if (calls := fleet.calls.get(encoder.name)) is None:
                raise _left(encoder)
            self._encode_calls[interruption] = encoder.name
            with fleet.table.open_encode(encoder, item.ref, self.request_id), interruption:
                reply = await calls.encode(request, trace_id=job.record.request_id)
            computed = ENCODED if Stage.ENCODE in encoder.stages else RECOMPUTED
            span.end(feature=STORED if reply.cached else computed)
        except ServeError:
            span.end(failed=True)
            raise
        finally:
            self._encode_calls.pop(interruption, None)


def _left(record: InstanceRecord) -> InstanceLost:
    return InstanceLost(f"instance {record.name} is no longer part of the deployment")
