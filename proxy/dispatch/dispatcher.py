"""Carries requests out on connections to instances, as their ways (epd_serve/flow/) ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never, get_args

from epd_serve.backends.base import Answer, StageCall, StageCalls
from epd_serve.backends.native import NativeInstance
from epd_serve.errors import InstanceLost, ServeError
from epd_serve.flow import actions as do
from epd_serve.flow import events as on
from epd_serve.flow.failures import Tried
from epd_serve.flow.request import Asked, Fleet, RequestFlow, State
from epd_serve.protocol.wire import DecodeRequest, EncodeRequest, MoveRequest, PrefillRequest
from epd_serve.routing.routes import Route
from epd_serve.routing.table import InstanceRecord, OpenCall
from epd_serve.telemetry.span import Span
from epd_serve.types import Stage
from proxy.dispatch.forwarding import Forwarding, Streamed, Whole
from proxy.dispatch.interruption import Interruption, TimeLimit
from proxy.dispatch.job import Instances, Job, demand_of
from proxy.dispatch.strands import stream_choices
from proxy.http.client import EventSink
from proxy.observe.record import DECODE, ENCODE, ENCODED, PREFILL, RECOMPUTED, STORED, TRANSFER

_LOOK_AGAIN_S = 0.05


class Dispatcher:
    """The executor of all requests' flows in one gateway."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def stream(
        self, job: Job, sink: EventSink, generated: Sequence[int] = (), tried: Tried | None = None
    ) -> None:
        """Write the answer's events to ``sink``. Raises ServeError, before or after ``sink.started``.

        ``generated`` are tokens that its client has already, ``tried`` is what was tried for them.
        """
        before = list(generated)
        answer = Streamed(job, sink, before)
        try:
            end = await self._run(job, answer, before, tried)
            if isinstance(end, do.SplitUp):
                job.record.again(continued=True)
                self._instances.metrics.request_continuations.inc()
                await stream_choices(self, job, end, sink)
        finally:
            progress = answer.progress
            job.record.streamed_all(progress.num_tokens if progress.framed else None)

    async def whole(self, job: Job) -> bytes:
        """The answer's JSON. Raises ServeError."""
        answer = Whole(job)
        await self._run(job, answer, [], None)
        return answer.body

    async def _run(self, job: Job, answer: Forwarding, generated: list[int], tried: Tried | None) -> do.End:
        instances, n = self._instances, job.sampling.n
        settings = instances.settings.now
        fleet = Fleet(
            table=instances.table,
            router=instances.router,
            max_attempts=settings.gateway.failover.max_attempts,
            wait_s=settings.failover_wait_s,
            encode_timeout_s=settings.encode_timeout_s,
        )
        asked = Asked(
            id=job.id,
            model=job.model,
            demand=await demand_of(job, instances),
            has_media=bool(job.items),
            num_choices=n,
            splits=n > 1 and not job.output.continuous_usage,  # else each event tells the usage of all together
            generated=generated,
        )
        return await Dispatch(instances, job, RequestFlow(fleet, asked, answer, tried), answer).run()


class _Call:
    """An open call to P or D, counted as in flight until it is closed."""

    __slots__ = ("_counted", "answer", "call")

    def __init__(self, call: StageCall, counted: OpenCall) -> None:
        self.call = call
        self.answer: Answer
        self._counted: OpenCall | None = counted

    @property
    def is_closed(self) -> bool:
        return self._counted is None

    def close(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            try:
                self.call.close()
            finally:
                counted.close()


class _Superseded(Exception):
    """Something has happened that makes it pointless to go on forwarding."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """One request: its calls, and the events that come of them.

    Actions are carried out as soon as they are asked for; those that take time by the task in :meth:`run`.
    """

    _instances: Instances
    _job: Job
    flow: RequestFlow
    _answer: Forwarding
    _events: list[on.Event] = field(default_factory=list, init=False)
    _is_feeding: bool = field(default=False, init=False)
    _step: do.Wait | do.Name | do.Forward | do.End | None = field(default=None, init=False)
    _news: asyncio.Future[None] | None = field(default=None, init=False)  # that the task waits for
    _interruption: Interruption = field(init=False)
    _is_forwarding: bool = field(default=False, init=False)
    _crash: Exception | None = field(default=None, init=False)
    _calls: dict[Stage, _Call] = field(default_factory=dict, init=False)
    _encodes: dict[int, tuple[asyncio.Task[None], Span]] = field(default_factory=dict, init=False)
    _cancelled: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _words: asyncio.TimerHandle | None = field(default=None, init=False)
    _request_id: str = field(default="", init=False)
    _stage: Span | None = field(default=None, init=False)  # of P and D, the one under way

    async def run(self) -> do.Done | do.SplitUp:
        """Until it is over. Raises ServeError."""
        losses, stealing = self._instances.health.losses, self._instances.stealing
        losses.watch(self)
        try:
            self._look()
            while True:
                try:
                    with Interruption(self._job.loop) as self._interruption:
                        return await self._steps()
                except _Superseded:
                    self._is_forwarding = False
        finally:
            losses.forget(self)
            if self.flow.state is not State.OVER:
                self.feed(on.Abandoned())
            if stealing.queued or self.flow.thief is not None:
                stealing.ended(self)
            if self._cancelled:
                await self._settle()

    async def _steps(self) -> do.Done | do.SplitUp:
        """Carry out what takes time."""
        while True:
            step, self._step = self._step, None
            if self._crash is not None:
                raise self._crash
            if step is None:
                self._news = self._job.loop.create_future()
                await self._news
                self._news = None
            elif isinstance(step, do.Forward):
                self._is_forwarding, stage = True, step.stage
                event = await self._answer.forward(stage, self.flow.route, self._calls[stage].answer)
                self._is_forwarding = False
                self.feed(event)
            elif isinstance(step, do.Wait):
                await self._settle()
                if step.until_s is not None:
                    await asyncio.sleep(_LOOK_AGAIN_S)
                self._look()
            elif isinstance(step, do.Name):
                items = self._job.items
                refs = [await item.name(step.fingerprint) for item in items]
                self.feed(on.Named(refs, [item.param for item in items]))
            elif isinstance(step, do.Fail):
                raise step.failure
            else:
                if isinstance(step, do.SplitUp):
                    self._job.record.attempt_failed(self._request_id)
                elif step.route is not None:
                    self._succeeded(step.route)
                return step

    def feed(self, event: on.Event) -> None:
        """Do what follows from an event, and from those that come of that."""
        events = self._events
        if self._is_feeding:
            events.append(event)
            return
        self._is_feeding = True
        try:
            while True:
                for action in self.flow.tell(event):
                    _ACTIONS[type(action)](self, action)
                if not events:
                    break
                event = events.pop(0)
        except Exception as error:  # noqa: BLE001 - a fault of the gateway's own, raised in the request's task
            self._crashed(error)
        finally:
            self._is_feeding = False
        if self._instances.table.has_thieves:
            self._instances.stealing.see(self)

    def _look(self) -> None:
        health = self._instances.health
        self.feed(on.Look(time.monotonic(), health.was_complete_at, health.held_back()))

    async def _settle(self) -> None:
        """Wait until encodes that were cancelled do not count as in flight any more."""
        if self._cancelled:
            await asyncio.wait(self._cancelled)
            self._cancelled.clear()

    def _succeeded(self, route: Route) -> None:
        instances = self._instances
        instances.health.ended(route.names)
        instances.pairs.worked(route.prefill, route.decode)

    def _crashed(self, error: Exception) -> None:
        self._crash = self._crash or error
        self._later(do.Wait())

    def _pass(self, stage: str, instance: str) -> None:
        """The stage of P or D under way is over, and the next one begins."""
        if self._stage is not None:
            self._stage.end()
        self._stage = self._job.record.begin(stage, self._request_id, instance)

    # ------------------------------------------------------------------ actions

    def _later(self, action: do.Wait | do.Name | do.Forward | do.End) -> None:
        """Have the task do what takes time."""
        self._step = action
        if self._news is not None:
            if not self._news.done():
                self._news.set_result(None)
        elif self._is_forwarding:
            self._interruption.fire(_Superseded())

    def _called(self, action: do.CallPrefill | do.CallMove | do.CallDecode) -> None:
        try:
            self._call(action)
        except ServeError as failure:
            stage = Stage.DECODE if isinstance(action, do.CallDecode) else Stage.PREFILL
            self._events.append(on.Refused(stage, failure))

    def _handed_over(self, action: do.HandOver) -> None:
        self._pass(DECODE, action.route.decode.name)
        if action.moved:
            self._instances.metrics.migrations.add(1.0, "moved")

    def _start_encode(self, action: do.Encode) -> None:
        record = self._job.record
        span = record.begin(ENCODE, action.request_id, action.encoder.name, action.ref.mm_hash)
        self._encodes[action.item] = self._job.loop.create_task(self._encode(action, span)), span

    def _cancel_encode(self, action: do.CancelEncode) -> None:
        task, span = self._encodes.pop(action.item)
        task.cancel()
        self._cancelled.append(task)
        if action.failed:
            span.end(failed=True)

    def _note(self, action: do.Note) -> None:
        """Note what is to be told of instances."""
        instances = self._instances
        match action:
            case do.Judge(names, failed):
                instances.health.ended(names, failed)
            case do.ReportLost(name):
                instances.poller.report_lost(name)
            case do.ReportLeaving(name):
                instances.table.mark_lost(name)
            case do.KeepApart(caller, peer):
                instances.pairs.failed(caller, peer)
            case do.FallBack():
                instances.metrics.migrations.add(1.0, "fallen_back")
            case _:
                assert_never(action)

    def _listen(self, action: do.Listen) -> None:
        self._words = self._job.loop.call_later(action.seconds, self.feed, on.Silent())

    def _begin(self, action: do.Try) -> None:
        record, metrics = self._job.record, self._instances.metrics
        record.attempt_failed(self._request_id)
        if action.kind == "stolen":
            metrics.requests_stolen.inc()
        else:
            continued = action.kind == "continued"
            record.again(continued=continued)
            (metrics.request_continuations if continued else metrics.request_retries).inc()

    def _call(self, action: do.CallPrefill | do.CallMove | do.CallDecode) -> None:
        """Open a call to P or D. Raises ServeError where that fails at once."""
        instances, route, table = self._instances, action.route, self._instances.table
        request_id = action.request_id
        if isinstance(action, do.CallDecode):
            call = self._decode_call(self._calls_to(route.decode), request_id)
            counted = table.in_flight(
                route.decode, Stage.DECODE, request_id=request_id, work=route.decode_work, again=action.again
            )
            self._open(Stage.DECODE, call, counted)
            return
        self._request_id = request_id
        decode = None if route.fused else instances.calls.get(route.decode.name)
        if decode is None and not route.fused:
            return  # the call to D, which comes next, says so
        again = True
        calls, decode_url = self._calls_to(route.prefill), None if decode is None else decode.url
        if isinstance(action, do.CallPrefill):
            again = action.again
            call = self._prefill_call(action, calls, decode_url)
        else:
            call = self._move_call(action, calls, decode_url or "")
        counted = table.in_flight(
            route.prefill,
            Stage.PREFILL,
            request_id=request_id,
            work=route.prefill_work,
            prefix=route.prefix,
            again=again,
        )
        self._open(Stage.PREFILL, call, counted)

    def _prefill_call(self, action: do.CallPrefill, calls: StageCalls, decode_url: str | None) -> StageCall:
        job, refs = self._job, action.refs
        job.record.items = [ref.mm_hash for ref in refs] if refs else []
        span = self._stage = job.record.begin(PREFILL, action.request_id, calls.name)
        request = PrefillRequest(
            request_id=action.request_id,
            output=job.output,
            sampling=job.sampling,
            items=refs,
            messages=job.messages,
            prompt=job.prompt,
            prompting=job.prompting,
            decode_url=decode_url,
            max_model_len=action.route.max_model_len,
            generated=action.generated,
            traceparent=job.record.traceparent(span),
        )
        return calls.prefill(request, trace_id=job.trace_id, media=[item.data for item in job.items])

    def _move_call(self, action: do.CallMove, calls: StageCalls, decode_url: str) -> StageCall:
        assert isinstance(calls, NativeInstance), "no other keeps KV"
        request = MoveRequest(
            request_id=action.request_id,
            held_id=action.held.request_id,
            decode_url=decode_url,
            max_model_len=action.route.max_model_len,
            num_generated=len(action.generated) if self._job.output.stream else None,
        )
        return calls.move(request, trace_id=self._job.trace_id)

    def _decode_call(self, calls: StageCalls, request_id: str) -> StageCall:
        job = self._job
        traceparent = job.record.traceparent()
        request = DecodeRequest(request_id=request_id, stream=job.output.stream, traceparent=traceparent)
        return calls.decode(request, trace_id=job.trace_id)

    def _calls_to(self, record: InstanceRecord) -> StageCalls:
        """Raises InstanceLost where the instance was taken out of the deployment meanwhile."""
        calls = self._instances.calls.get(record.name)
        if calls is None:
            raise InstanceLost(f"instance {record.name} is no longer part of the deployment")
        return calls

    def _open(self, stage: Stage, call: StageCall, counted: OpenCall) -> None:
        self._calls[stage] = opened = _Call(call, counted)
        call.opened.add_done_callback(partial(self._opened, stage, opened))

    def _opened(self, stage: Stage, call: _Call, opened: asyncio.Future[Answer]) -> None:
        """The answer has begun, or will not."""
        if call.is_closed or opened.cancelled():
            return
        error = opened.exception()
        if error is None:
            call.answer = answer = opened.result()
            follows = answer.decode_follows
            if stage is Stage.PREFILL:
                route = self.flow.route
                has_next = follows and not route.fused
                next_one = route.decode if has_next else route.prefill
                record = self._job.record
                record.prompt_note = answer.prompt_note or record.prompt_note
                self._pass(TRANSFER if has_next else DECODE, next_one.name)
            self.feed(on.Opened(stage, follows))
        elif isinstance(error, ServeError):
            self.feed(on.Refused(stage, error))
        elif isinstance(error, Exception):
            self._crashed(error)

    def _close(self, action: do.Close) -> None:
        if self._words is not None:
            self._words.cancel()
            self._words = None
        if (call := self._calls.pop(action.stage, None)) is not None:  # else it was refused at once
            call.close()

    async def _encode(self, action: do.Encode, span: Span) -> None:
        instances, record, item = self._instances, self._job.record, self._job.items[action.item]
        encoder, prefill = action.encoder, action.prefill
        if action.again:
            record.encode_retries += 1
            instances.metrics.encode_retries.inc()
        try:
            announce_to = self._calls_to(prefill).url
        except InstanceLost as lost:
            self.feed(on.Refused(Stage.PREFILL, lost))
            return
        request = EncodeRequest(
            request_id=action.request_id,
            ref=action.ref,
            media=item.data,
            announce_to=announce_to,
            traceparent=record.traceparent(span),
        )
        event: on.Event = on.Encoded(action.item)
        try:
            with instances.table.encoding(encoder, action.ref, action.request_id) as encoding:
                with TimeLimit(self._job.loop, action.patience_s, TimeoutError()):
                    reply = await self._calls_to(encoder).encode(request, trace_id=self._job.trace_id)
                encoding.was_cached = reply.cached
            computed = ENCODED if encoder.covers(Stage.ENCODE) else RECOMPUTED
            span.end(feature=STORED if reply.cached else computed)
            instances.health.ended((encoder.name,))
            instances.pairs.worked(encoder, prefill)
        except TimeoutError:
            event = on.EncodeLate(action.item)
        except ServeError as failure:
            event = on.EncodeFailed(action.item, failure)
        except Exception as error:  # noqa: BLE001 - a fault of the gateway's own, raised in the request's task
            self._crashed(error)
            return
        if not isinstance(event, on.Encoded):
            span.end(failed=True)
        self.feed(event)


_ACTIONS: dict[type, Callable[[Dispatch, Any], None]] = {
    do.CallPrefill: Dispatch._called,
    do.CallMove: Dispatch._called,
    do.CallDecode: Dispatch._called,
    do.Encode: Dispatch._start_encode,
    do.Close: Dispatch._close,
    do.CancelEncode: Dispatch._cancel_encode,
    do.HandOver: Dispatch._handed_over,
    do.Listen: Dispatch._listen,
    do.Try: Dispatch._begin,
    **dict.fromkeys(get_args(do.Note), Dispatch._note),
    **dict.fromkeys((do.Wait, do.Name, do.Forward, *get_args(do.End)), Dispatch._later),
}
