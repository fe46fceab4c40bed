"""One try of one request: all its stage calls, made at once, and undone together."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from epd_serve.backends.base import Answer, InstanceLost, StageCall, StageCalls
from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    KV_HELD,
    NO_ROOM,
    PEER_UNREACHABLE,
    PREPARATION_FULL,
    REQUEST_ENDED,
    InstanceFailed,
    InvalidRequest,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.metrics.breakdown import GATEWAY_RECEIVE, GATEWAY_SERVE
from epd_serve.protocol.wire import DecodeRequest, EncodeRequest, MediaRef, PrefillRequest
from epd_serve.routing.policy import Route
from epd_serve.routing.table import InstanceRecord, OpenCall
from epd_serve.types import Stage
from proxy.failover import is_planned
from proxy.interruption import TimeLimit
from proxy.job import Instances, Job
from proxy.media import MediaItem
from proxy.migration import HeldKV
from proxy.stealing import Claim
from proxy.trail import ENCODED, RECOMPUTED, STORED

#: Encoders that may leave one item without an answer before P encodes it itself.
_MAX_STALLED = 2
#: How long D, when P has broken off, may take to say why.
_LAST_WORDS_S = 0.5


class _Call:
    """An open call to P or D, counted as in flight until it is closed."""

    __slots__ = ("_call", "_counted", "opened", "record")

    def __init__(self, record: InstanceRecord, call: StageCall, counted: OpenCall) -> None:
        self.record = record
        self.opened = call.opened
        self._call = call
        self._counted: OpenCall | None = counted

    def close(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            try:
                self._call.close()
            finally:
                counted.close()


class Attempt:
    """Async context: entering sends everything, leaving closes what is still open, which cancels its work.

    ``generated`` are output tokens that the client has already; ``held`` is where their KV and the prompt's lie.
    ``suspects`` are the instances to which the request should not be sent again after a failure; ``is_cut`` says
    that none of them has failed, but P cannot reach D.
    """

    def __init__(
        self,
        instances: Instances,
        job: Job,
        route: Route,
        refs: list[MediaRef],
        number: int,
        generated: list[int] | None = None,
        claim: Claim | None = None,
        held: HeldKV | None = None,
    ) -> None:
        self._instances = instances
        self._job = job
        self._route = route
        self._refs = refs
        self._generated = generated or []
        self._claim = claim
        self._held = held
        self._is_moved = False
        self._is_again = number > 1 or job.tried is not None
        # Each attempt has an id of its own: the one before may still be on its way out of P and D.
        self._id = f"{job.id}-{number}"
        self._encodes: list[asyncio.Task[None]] = []
        self._prefill: _Call
        self._decode: _Call | None = None
        self.suspects: set[str] = set()
        self.is_cut = False
        self.trail = job.trail

    async def __aenter__(self) -> Self:
        table, route, job = self._instances.table, self._route, self._job
        self._sent_at = time.monotonic()
        distinct: dict[str, tuple[MediaRef, MediaItem]] = {}
        encoders: list[InstanceRecord] = []
        if self._refs:
            distinct = {ref.mm_hash: (ref, item) for ref, item in zip(self._refs, job.items, strict=True)}
            items = [ref for ref, _ in distinct.values()]
            encoders = self._instances.policy.choose_encoders(table, route.prefill, items)
        call = self._call_prefill() if self._held is None else self._call_move(self._held)
        counted = table.in_flight(
            route.prefill,
            Stage.PREFILL,
            request_id=self._id,
            work=route.prefill_work,
            prefix=route.prefix,
            again=self._is_again,
        )
        self._prefill = _Call(route.prefill, call, counted)
        if not route.fused:
            traceparent = job.trail.traceparent()
            expected = DecodeRequest(request_id=self._id, stream=job.output.stream, traceparent=traceparent)
            try:
                call = self._calls(route.decode).decode(expected, trace_id=job.trace_id)
            except BaseException:
                self._prefill.close()
                raise
            counted = table.in_flight(
                route.decode, Stage.DECODE, request_id=self._id, work=route.decode_work, again=self._is_again
            )
            self._decode = _Call(route.decode, call, counted)
        if distinct:
            self._encodes = [
                job.loop.create_task(self._encode(ref, item, encoder))
                for (ref, item), encoder in zip(distinct.values(), encoders, strict=True)
            ]
        return self

    def _call_prefill(self) -> StageCall:
        job, route = self._job, self._route
        hop = job.trail.sent(route.prefill.name, [ref.mm_hash for ref in self._refs] if self._refs else [])
        prefill = PrefillRequest(
            request_id=self._id,
            output=job.output,
            sampling=job.sampling,
            items=self._refs,
            messages=job.messages,
            prompt=job.prompt,
            prompting=job.prompting,
            decode_url=None if route.fused else self._calls(route.decode).url,
            max_model_len=route.max_model_len,
            generated=self._generated,
            traceparent=job.trail.traceparent(hop),
        )
        media = [item.data for item in job.items]
        return self._calls(route.prefill).prefill(prefill, trace_id=job.trace_id, media=media)

    def _call_move(self, held: HeldKV) -> StageCall:
        """In P's place: D that leaves."""
        job, route = self._job, self._route
        job.trail.moving()
        calls, url = self._calls(route.prefill), self._calls(route.decode).url
        num_generated = len(self._generated) if job.output.stream else None
        return held.move(calls, self._id, route, url, job.trace_id, num_generated=num_generated)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (trace_writer := self._instances.trace) is not None:
            trace_writer.span(self._id, GATEWAY_RECEIVE, self._job.arrived_s, self._sent_at)
            trace_writer.span(self._id, GATEWAY_SERVE, self._sent_at, time.monotonic())
        try:
            if self._encodes:
                open_ones = [task for task in self._encodes if not task.done()]
                for task in open_ones:
                    task.cancel()
                if open_ones:
                    await asyncio.wait(open_ones)
                for task in self._encodes:
                    if not task.cancelled():
                        task.exception()  # nobody has to ask for it
        finally:
            self._prefill.close()
            self.close_decode()

    async def first(self) -> Answer:
        """P's answer, once the first token is there.

        Raises what any of the calls failed with before that, and Moved where a thief has taken the request.
        """
        opened = self._prefill.opened
        news = self._job.loop.create_future()

        def tell(done: asyncio.Future[Any]) -> None:
            """Of P's answer, or of what makes it pointless to wait for it."""
            if not news.done() and (done is opened or done.cancelled() or done.exception() is not None):
                news.set_result(None)

        waiting: list[asyncio.Future[Any]] = [opened, *self._encodes]
        if self._decode is not None:
            waiting.append(self._decode.opened)
        for one in waiting:
            one.add_done_callback(tell)
        stealing, claim = self._instances.stealing, self._claim
        if claim is None or claim.thief is not None or self._generated or self._held is not None:
            await news
        else:
            with stealing.until_first(self._job.loop, claim, self._job.model, self._route, self._encodes):
                await news
        # An encode's failure explains that of P, and P's that of D.
        for encode in self._encodes:
            if encode.done():
                encode.result()
        if self._decode is not None:
            if opened.done() and _says(opened, REQUEST_ENDED):  # D says why
                await asyncio.wait({self._decode.opened}, timeout=_LAST_WORDS_S)
            if self._decode.opened.done() and (not opened.done() or _says(opened, REQUEST_ENDED)):
                self._result(self._decode)
        answer, route = self._result(self._prefill), self._route
        follows = answer.decode_follows and not route.fused
        next_one = route.decode if follows else route.prefill
        self.trail.prefilled(answer.prompt_note, next_one.name, follows=follows)
        return answer

    async def rest(self) -> Answer:
        """D's answer, once it begins."""
        if self._decode is None:
            raise InstanceFailed(
                f"instance {self._route.prefill.name} left the answer to a decode instance; it has none"
            )
        if self._held is not None and not self._is_moved:
            self._is_moved = True
            self._instances.metrics.migrations.add(1.0, "moved")
        with suppress(ServeError):
            await self._decode.opened
        return self._result(self._decode)

    def close_decode(self) -> None:
        """Take back what D was told to expect."""
        if self._decode is not None:
            self._decode.close()

    async def broken_off(self, record: InstanceRecord) -> None:
        """An instance broke off its answer: it is lost, or it is P, alive, whose hand-over to D has failed.

        Then D knows more, and its failure is raised: D itself is lost, or it was told why P gave up.
        """
        if self._decode is not None and record is self._route.prefill:
            await asyncio.wait({self._decode.opened}, timeout=_LAST_WORDS_S)
            opened = self._decode.opened
            failure = opened.exception() if opened.done() and not opened.cancelled() else None
            if isinstance(failure, InstanceFailed) or (isinstance(failure, ServeError) and is_planned(failure)):
                self._result(self._decode)
        self.lost(record)

    def lost(self, record: InstanceRecord) -> None:
        """The connection to an instance failed."""
        self._instances.poller.report_lost(record.name)
        self.suspects.add(record.name)

    @property
    def job(self) -> Job:
        return self._job

    @property
    def route(self) -> Route:
        return self._route

    def leaver(self, name: str, failure: ServeError) -> str:
        """Which of the two a request must not go to again, where ``name`` broke off its answer."""
        return self._route.decode.name if failure.code == DECODE_DRAINING else name

    def said(self, name: str, failure: ServeError) -> None:
        """An instance has said why it breaks off its answer."""
        if not self._cut(failure):
            self.suspects.add(self.leaver(name, failure))

    def _cut(self, failure: ServeError) -> bool:
        """Whether the failure is of the two together."""
        self.is_cut = failure.code == PEER_UNREACHABLE
        if self.is_cut:
            self._instances.pairs.failed(self._route.prefill, self._route.decode)
        return self.is_cut

    def held_after(self, failure: ServeError) -> HeldKV | None:
        """The answer's KV, where the instance that decoded it has kept it."""
        return HeldKV(self._route.decode, self._id) if failure.code == KV_HELD else None

    @property
    def is_moving(self) -> bool:
        """Whether it was to move KV and has not."""
        return self._held is not None and not self._is_moved

    def was_left(self, failure: ServeError, *, begun: bool) -> bool:
        """Whether its decode instance leaves an answer that has begun, or was to get the KV of one that does."""
        leaves = failure.code == KV_HELD or (failure.code == DRAINING and begun)
        return self.is_moving or (leaves and self._route.decode.name in self.suspects)

    def record(self, name: str) -> InstanceRecord:
        """One of the route's two, which need not be in the table any more."""
        return self._route.prefill if name == self._route.prefill.name else self._route.decode

    def _calls(self, record: InstanceRecord) -> StageCalls:
        """Raises InstanceLost where the instance was taken out of the deployment meanwhile."""
        calls = self._instances.calls.get(record.name)
        if calls is None:
            self.suspects.add(record.name)
            raise InstanceLost(f"instance {record.name} is no longer part of the deployment")
        return calls

    def _result(self, call: _Call) -> Answer:
        try:
            return call.opened.result()
        except InstanceLost:
            self.lost(call.record)
            raise
        except ServeError as error:
            if not self._cut(error):
                self.suspects.add(self._blamed(call, error).name)
            raise

    def _blamed(self, call: _Call, error: ServeError) -> InstanceRecord:
        """Whose failure it is that an instance, which is alive, reports."""
        if self._held is not None and call.record is self._route.prefill:  # others may reach D all the same
            return self.record(self.leaver(call.record.name, error))
        if call.record is self._route.prefill:
            is_decodes = isinstance(error, InstanceFailed) or error.code in (NO_ROOM, REQUEST_ENDED)
            return self._route.decode if is_decodes else call.record
        return self._route.prefill if isinstance(error, StageTimeout) else call.record

    async def _encode(self, ref: MediaRef, item: MediaItem, encoder: InstanceRecord) -> None:
        """Encode one item; after a failure on another E, at last on P itself, which loads the tower for it.

        P waits for the feature for twice ``encode_timeout_s``. An E that gives no answer may take half of that,
        the next half of the rest; what is left then is for P, however many more encoders there are, and P itself
        says when it is over.
        """
        instances, prefill = self._instances, self._route.prefill
        tried: set[str] = set()
        patience_s, num_stalled = instances.encode_timeout_s, 0
        while True:
            hop = self.trail.encode(encoder.name, ref.mm_hash)
            request = EncodeRequest(
                request_id=self._id,
                ref=ref,
                media=item.data,
                announce_to=self._calls(prefill).url,
                traceparent=self.trail.traceparent(hop),
            )
            try:
                with (
                    instances.table.encoding(encoder, ref, self._id) as encoding,
                    instances.health.losses.unless_lost(self._job.loop, (encoder.name,)),
                ):
                    with TimeLimit(self._job.loop, None if encoder is prefill else patience_s, TimeoutError()):
                        reply = await self._calls(encoder).encode(request, trace_id=self._job.trace_id)
                    encoding.was_cached = reply.cached
                hop.end(STORED if reply.cached else ENCODED if encoder.covers(Stage.ENCODE) else RECOMPUTED)
                instances.health.ended((encoder.name,))
                instances.pairs.worked(encoder, prefill)
                return
            except InvalidRequest as error:
                error.param = error.param or item.param
                raise
            except InstanceLost as error:
                self.lost(encoder)
                failure: ServeError = error
            except TimeoutError:
                failure = StageTimeout(f"instance {encoder.name} gave no answer in {patience_s:g} s")
                num_stalled += 1
                patience_s /= 2
            except ServeError as error:
                failure = error
            hop.fail()
            tried.add(encoder.name)
            if failure.code == PEER_UNREACHABLE:
                instances.pairs.failed(encoder, prefill)
            elif not isinstance(failure, Unavailable):
                instances.health.ended((encoder.name,), (encoder.name,))
            if num_stalled < _MAX_STALLED:
                choice = instances.policy.choose_encoders(instances.table, prefill, [ref], exclude=tried)
                [encoder] = choice
            else:
                encoder = prefill
            if failure.code == PREPARATION_FULL and (encoder.name in tried or not encoder.covers(Stage.ENCODE)):
                raise failure  # P does not take over what encoders are only too busy for
            if encoder.name in tried:
                if is_planned(failure):  # P leaves its role; else it would encode the item itself
                    self.suspects.add(prefill.name)
                    raise failure
                raise InstanceFailed(f"the image could not be encoded: {failure.message}", param=item.param)
            self.trail.encode_retries += 1
            instances.metrics.encode_retries.inc()


def _says(opened: asyncio.Future[Answer], code: str) -> bool:
    """Whether a call that is over has failed with ``code``."""
    failure = None if opened.cancelled() else opened.exception()
    return isinstance(failure, ServeError) and failure.code == code
