"""Carries requests out on connections to instances, as their ways (epd_serve/flow/) ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never, get_args

from msgspec import Struct

from epd_serve.backends.base import Answer, StageCall, StageCalls
from epd_serve.errors import InstanceLost, ServeError
from epd_serve.flow import actions as do
from epd_serve.flow import events as on
from epd_serve.flow.failures import TryHistory
from epd_serve.flow.request import Asked, Fleet, RequestFlow, State
from epd_serve.protocol.wire import DecodeRequest, EncodeRequest, PrefillRequest
from epd_serve.routing.routes import Demand
from epd_serve.routing.table import InstanceRecord, OpenCall
from epd_serve.telemetry.span import Span
from epd_serve.types import Stage
from proxy.dispatch.forwarding import EventSink, Forwarding, Streamed, Whole
from proxy.dispatch.interruption import Interruption
from proxy.dispatch.job import Instances, Job, beginnings, prompt_pieces
from proxy.dispatch.strands import stream_choices
from proxy.observe.record import DECODE, ENCODE, ENCODED, PREFILL, RECOMPUTED, STORED, TRANSFER
from proxy.settings import GatewaySettings

_P, _D = Stage.PREFILL, Stage.DECODE
LOOK_AGAIN_S = 0.05
#: Of one request, or of each choice that continues by itself; the first and all continuations included.
MAX_ATTEMPTS = 5


class Dispatcher:
    """The executor of all requests' flows in one gateway."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._settings: GatewaySettings | None = None
        self._fleet: Fleet

    async def stream(
        self, job: Job, sink: EventSink, generated: Sequence[int] = (), history: TryHistory | None = None
    ) -> None:
        """Write the answer's events to ``sink``. Raises ServeError, before or after ``sink.started``.

        ``generated`` are tokens that its client has already, ``history`` the tries that were made for them.
        """
        answer = Streamed(job, sink, list(generated))
        try:
            dispatch = await self._dispatch(job, answer, answer.before, history)
            end = await dispatch.run()
            if isinstance(end, do.SplitUp):
                job.record.again(continued=True)
                await stream_choices(self, job, end, sink)
        finally:
            job.record.streamed_all(answer.num_tokens if answer.known and answer.readers else None)

    async def whole(self, job: Job) -> bytes:
        """The answer's JSON. Raises ServeError."""
        answer = Whole(job)
        dispatch = await self._dispatch(job, answer, [])
        await dispatch.run()
        return answer.body

    async def _dispatch(
        self, job: Job, answer: Forwarding, generated: list[int], history: TryHistory | None = None
    ) -> Dispatch:
        """A request ready to be carried out, with the settings of now."""
        instances, settings = self._instances, self._instances.settings
        if self._settings is not settings:
            self._settings = settings
            self._fleet = Fleet(
                table=instances.table,
                router=instances.router,
                max_attempts=MAX_ATTEMPTS,
                encode_timeout_s=settings.encode_timeout_s,
            )
        pieces = await prompt_pieces(job, instances.table) if instances.router.routes.uses_prefix else ()
        flow = RequestFlow(self._fleet, _asked(job, pieces, generated), answer, history)
        return Dispatch(instances, job, answer, flow)


class _Superseded(Exception):
    """Something has happened that makes it pointless to go on forwarding."""


class Dispatch(Struct, eq=False):
    """One request: its calls, and the events that come of them.

    Actions are carried out as soon as they are asked for; those that take time by the task in :meth:`run`.
    """

    _instances: Instances
    _job: Job
    _answer: Forwarding
    flow: RequestFlow
    _events: list[on.Event] = []
    _is_feeding: bool = False
    _step: do.Wait | do.Name | do.Forward | do.End | None = do.Wait()
    _news: asyncio.Future[None] | None = None  # that the task waits for
    _interruption: Interruption | None = None  # of the task, while it forwards
    _crash: Exception | None = None
    _calls: dict[Stage, tuple[StageCall, OpenCall]] = {}  # each counts as in flight until it is closed
    _encodes: dict[int, tuple[asyncio.Task[None], Span]] = {}
    _cancelled: list[asyncio.Task[None]] = []
    _words: asyncio.TimerHandle | None = None
    _request_id: str = ""
    _stage: Span | None = None  # of P and D, the one under way

    async def run(self) -> do.Done | do.SplitUp:
        """Until it is over. Raises ServeError."""
        job, monitor = self._job, self._instances.monitor
        monitor.watchers.add(self)
        try:
            while True:
                step, self._step = self._step, None
                if self._crash is not None:
                    raise self._crash
                if isinstance(step, do.Forward):
                    await self._forward(step.stage)
                elif step is None:
                    self._news = job.loop.create_future()
                    await self._news
                    self._news = None
                elif isinstance(step, do.Wait):
                    if self._cancelled:  # until they do not count as in flight any more
                        await asyncio.wait(self._cancelled)
                        self._cancelled.clear()
                    if step.until_s is not None:
                        await asyncio.sleep(LOOK_AGAIN_S)
                    self.feed(on.Look(job.loop.time(), monitor.wait_s, monitor.complete_at_s))
                elif isinstance(step, do.Name):
                    refs = [await item.name(step.fingerprint) for item in job.items]
                    self.feed(on.Named(refs, [item.param for item in job.items]))
                elif isinstance(step, do.Fail):
                    raise step.failure
                else:
                    if isinstance(step, do.SplitUp):
                        job.record.attempt_failed(self._request_id)
                    return step
        finally:
            monitor.watchers.discard(self)
            if self.flow.state is not State.OVER:
                self.feed(on.Abandoned())
            if self._cancelled:
                await asyncio.wait(self._cancelled)

    async def _forward(self, stage: Stage) -> None:
        """Forward an answer to its end, or until something happens that makes it pointless to go on."""
        try:
            with Interruption(self._job.loop) as self._interruption:
                answer = self._calls[stage][0].opened.result()
                event = await self._answer.forward(stage, self.flow.route, answer)
        except _Superseded:
            return
        finally:
            self._interruption = None
        self.feed(event)

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
        elif self._interruption is not None:
            self._interruption.fire(_Superseded())

    def _handed_over(self, action: do.HandOver) -> None:
        self._pass(DECODE, action.route.decode.name)

    def _start_encode(self, action: do.Encode) -> None:
        record = self._job.record
        span = record.begin(ENCODE, action.request_id, action.encoder.name, action.ref.mm_hash)
        self._encodes[action.item] = self._job.loop.create_task(self._encode(action, span)), span

    def _cancel_encode(self, action: do.CancelEncode) -> None:
        task, span = self._encodes.pop(action.item)
        task.cancel()
        self._cancelled.append(task)
        span.end(failed=True)

    def _note(self, action: do.Note) -> None:
        """Note what is to be told of instances."""
        instances = self._instances
        match action:
            case do.ReportLost(name):
                instances.monitor.report_lost(name)
            case do.ReportLeaving(name):
                instances.table.mark_lost(name)
            case _:
                assert_never(action)

    def _listen(self, action: do.Listen) -> None:
        self._words = self._job.loop.call_later(action.seconds, self.feed, on.Silent())

    def _begin(self, action: do.Try) -> None:
        self._job.record.attempt_failed(self._request_id)
        self._job.record.again(continued=action.kind == "continued")

    def _call_both(self, action: do.CallPrefill) -> None:
        """Call P, and D unless it is the same one."""
        instances, job, route, table = self._instances, self._job, action.route, self._instances.table
        request_id = self._request_id = action.request_id
        first, second = instances.calls.get(route.prefill.name), instances.calls.get(route.decode.name)
        if first is None or second is None:
            stage, record = (_P, route.prefill) if first is None else (_D, route.decode)
            self._events.append(on.Refused(stage, _left(record)))
            return
        decode_url, stage = None if route.fused else second.url, _P
        try:
            again, call = action.again, self._prefill_call(action, first, decode_url)
            counted = table.in_flight(
                route.prefill, _P, request_id=request_id, work=route.prefill_work, prefix=route.prefix, again=again
            )
            self._calls[_P] = call, counted
            call.opened.add_done_callback(partial(self._opened, _P))
            if not route.fused:
                stage = _D
                expected = DecodeRequest(
                    request_id=request_id, stream=job.output.stream, traceparent=job.record.traceparent
                )
                call = second.decode(expected, trace_id=job.trace_id)
                counted = table.in_flight(
                    route.decode, _D, request_id=request_id, work=route.decode_work, again=again
                )
                self._calls[_D] = call, counted
                call.opened.add_done_callback(partial(self._opened, _D))
        except ServeError as failure:
            self._events.append(on.Refused(stage, failure))

    def _prefill_call(self, action: do.CallPrefill, calls: StageCalls, decode_url: str | None) -> StageCall:
        job, refs, record = self._job, action.refs, self._job.record
        record.items = [part.mm_hash for ref in refs for part in ref.segments] if refs else []
        span = self._stage = record.begin(PREFILL, action.request_id, calls.name)
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
            traceparent=record.traceparent_of(span) if record.context.sampled else record.traceparent,
        )
        return calls.prefill(request, trace_id=job.trace_id, media=[item.data for item in job.items])

    def _opened(self, stage: Stage, opened: asyncio.Future[Answer]) -> None:
        """The answer has begun, or will not."""
        entry = self._calls.get(stage)
        if entry is None or entry[0].opened is not opened or opened.cancelled():  # the call was closed
            return
        error = opened.exception()
        if error is None:
            answer = opened.result()
            follows = answer.decode_follows
            if stage is _P:
                route, record = self.flow.route, self._job.record
                record.prompt_note = answer.prompt_note or record.prompt_note
                if follows and not route.fused:
                    self._pass(TRANSFER, route.decode.name)
                else:
                    self._pass(DECODE, route.prefill.name)
            self.feed(on.Opened(stage, follows))
        elif isinstance(error, ServeError):
            self.feed(on.Refused(stage, error))
        elif isinstance(error, Exception):
            self._crashed(error)

    def _release(self, action: do.Release) -> None:
        if (entry := self._calls.pop(_D, None)) is not None:
            call, counted = entry
            try:
                call.close()
            finally:
                counted.close()

    def _end_try(self, action: do.EndTry) -> None:
        self._close_all()

    def _done(self, action: do.Done) -> None:
        self._close_all()
        self._later(action)

    def _close_all(self) -> None:
        if self._words is not None:
            self._words.cancel()
            self._words = None
        if self._encodes:
            for task, _ in self._encodes.values():
                task.cancel()
                self._cancelled.append(task)
            self._encodes.clear()
        calls, self._calls = self._calls, {}
        for call, counted in calls.values():
            try:
                call.close()
            finally:
                counted.close()

    async def _encode(self, action: do.Encode, span: Span) -> None:
        instances, record, item = self._instances, self._job.record, self._job.items[action.place]
        encoder, prefill = action.encoder, action.prefill
        if action.again:
            record.encode_retries += 1
        calls, announce_to = instances.calls.get(encoder.name), instances.calls.get(prefill.name)
        if announce_to is None:
            self.feed(on.Refused(_P, _left(prefill)))
            return
        request = EncodeRequest(
            request_id=action.request_id,
            ref=action.ref,
            media=item.data,
            announce_to=announce_to.url,
            traceparent=record.traceparent_of(span) if record.context.sampled else record.traceparent,
        )
        event: on.Event = on.Encoded(action.item)
        try:
            if calls is None:
                raise _left(encoder)
            counted = instances.table.encoding(encoder, action.ref, action.request_id)
            with counted, Interruption(self._job.loop, action.patience_s):
                reply = await calls.encode(request, trace_id=self._job.trace_id)
            computed = ENCODED if Stage.ENCODE in encoder.stages else RECOMPUTED
            span.end(feature=STORED if reply.cached else computed)
        except TimeoutError:
            event = on.EncodeLate(action.item)
        except ServeError as failure:
            event = on.EncodeFailed(action.item, failure)
        except Exception as error:  # noqa: BLE001 - a fault of the gateway's own, raised in the request's task
            self._crashed(error)
            return
        if not isinstance(event, on.Encoded):
            span.end(failed=True)
        self._encodes.pop(action.item, None)
        self.feed(event)


def _asked(job: Job, pieces: Sequence[str], generated: list[int]) -> Asked:
    """The properties of a request on which its way depends; of the prompt's ``pieces``, the beginnings."""
    num_characters = num_tokens = num_pixels = 0
    for message in job.messages or ():
        num_characters += len(message.role)
        for part in message.content:
            num_characters += len(part.text)
    if isinstance(job.prompt, str):
        num_characters = len(job.prompt)
    elif job.prompt is not None:
        num_tokens = len(job.prompt)
    for item in job.items:
        num_pixels += item.ref.num_pixels
    named, fingerprint = None, job.items[0].fingerprint if job.items else ""
    if job.items and all(item.ref.mm_hash and item.fingerprint == fingerprint for item in job.items):
        named = fingerprint, on.Named([item.ref for item in job.items], [item.param for item in job.items])
    demand = Demand(
        num_characters=num_characters,
        num_tokens=num_tokens,
        num_pixels=num_pixels,
        max_tokens=job.sampling.max_tokens,
        num_sequences=job.sampling.n,
        prefix=beginnings(pieces) if pieces else (),
        prefix_characters=sum(map(len, pieces)),
    )
    return Asked(
        id=job.id,
        model=job.model,
        demand=demand,
        has_media=bool(job.items),
        named=named,
        num_choices=job.sampling.n,
        # else each event tells the usage of all together
        splits=job.sampling.n > 1 and not job.output.continuous_usage,
        generated=generated,
    )


def _left(record: InstanceRecord) -> InstanceLost:
    """Say that an instance was taken out of the deployment meanwhile."""
    return InstanceLost(f"instance {record.name} is no longer part of the deployment")


_ACTIONS: dict[type, Callable[[Dispatch, Any], None]] = {
    do.CallPrefill: Dispatch._call_both,
    do.Encode: Dispatch._start_encode,
    do.Release: Dispatch._release,
    do.EndTry: Dispatch._end_try,
    do.CancelEncode: Dispatch._cancel_encode,
    do.HandOver: Dispatch._handed_over,
    do.Listen: Dispatch._listen,
    do.Try: Dispatch._begin,
    **dict.fromkeys(get_args(do.Note), Dispatch._note),
    **dict.fromkeys((do.Wait, do.Name, do.Forward, *get_args(do.End)), Dispatch._later),
    do.Done: Dispatch._done,
}
