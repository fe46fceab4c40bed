"""Runs a request on the instances: choose, send, forward; goes on with others where one fails."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TypeVar

from epd_serve.backends.base import Answer, InstanceLost, InstanceUnreachable
from epd_serve.errors import InstanceFailed, ServeError, Unavailable, error_from_response
from epd_serve.protocol.frames import FrameError
from epd_serve.routing.policy import Demand, Route
from proxy.attempt import Attempt
from proxy.choices import goes_on_apart, stream_choices
from proxy.demand import demand_of
from proxy.failover import Failover, InstanceStalled, Suspects, Tried, is_planned, may_help, substitute
from proxy.job import Instances, Job
from proxy.migration import HeldKV
from proxy.progress import Progress, broke
from proxy.sink import EventSink
from proxy.stealing import Claim, Moved

T = TypeVar("T")
#: Attempts that ended because an instance left its role, and do not count.
_MAX_PLANNED = 50
#: What a token may take of an answer, once more for itself and each alternative where its log-probability is told;
#: what an answer has beside them.
_TOKEN_BYTES, _ANSWER_BYTES = 1024, 1024**2


class Generator:
    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def reconfigure(self, failover: Failover) -> None:
        """For the next requests."""
        self._instances = replace(self._instances, failover=failover)

    async def stream(self, job: Job, sink: EventSink) -> None:
        """Write the answer's events to ``sink``. Raises ServeError, before or after ``sink.started``."""
        progress = Progress(job.sampling.n, job.generated)
        tried = job.tried or self._nothing_tried()

        async def forward(attempt: Attempt) -> None:
            answer, record = await attempt.first(), attempt.route.prefill
            if not answer.decode_follows:
                attempt.close_decode()
            await self._relay(attempt, record.name, answer, progress, sink)
            if answer.decode_follows:
                job.trail.handed_over(attempt.route.decode.name)
                answer, record = await attempt.rest(), attempt.route.decode
                await self._relay(attempt, record.name, answer, progress, sink)
            if not progress.complete:
                attempt.suspects.add(record.name)
                raise InstanceFailed(f"instance {record.name} ended its answer before it was complete")

        try:
            await self._try(
                job,
                tried,
                forward,
                lambda: not progress.complete and (not sink.started or progress.resumable),
                lambda: progress.tokens() if progress.resumable else [],
            )
        except ServeError as failure:
            if progress.complete:  # the client has all of its answer
                return
            has_attempts = tried.num_attempts < self._instances.failover.max_attempts
            goes_on = tried.failure is failure and has_attempts and goes_on_apart(job, progress)
            if not (sink.started and goes_on):
                raise
            job.trail.again(continued=True)
            self._instances.metrics.request_continuations.inc()
            await stream_choices(self, job, progress.tokens_of_each(), tried, sink)
        finally:
            job.trail.streamed_all(progress.num_tokens if progress.framed else None)

    async def whole(self, job: Job) -> bytes:
        """The answer's JSON. Raises ServeError."""

        async def collect(attempt: Attempt) -> bytes:
            answer = await attempt.first()
            name = attempt.route.prefill.name
            if answer.decode_follows:
                # P's empty body ends when it has handed over; a break in it must not leave us waiting for D.
                await self._body(attempt, name, answer)
                job.trail.handed_over(attempt.route.decode.name)
                answer = await attempt.rest()
                name = attempt.route.decode.name
            else:
                attempt.close_decode()
            body = await self._body(attempt, name, answer)
            if not body:
                raise InstanceFailed(f"instance {name} gave an empty answer")
            return body

        return await self._try(job, self._nothing_tried(), collect, lambda: True)

    def _nothing_tried(self) -> Tried:
        return Tried(Suspects(self._instances.table))

    async def _try(
        self,
        job: Job,
        tried: Tried,
        use: Callable[[Attempt], Awaitable[T]],
        may_go_on: Callable[[], bool],
        generated: Callable[[], list[int]] = list,
    ) -> T:
        """What ``use`` makes of an attempt; after a failure of another one, which goes on behind the tokens that
        are ``generated`` until then; ``tried`` knows of it."""
        stealing = self._instances.stealing
        if not stealing.is_on:
            return await self._try_each(job, tried, use, may_go_on, generated, None)
        with stealing.claim() as claim:
            return await self._try_each(job, tried, use, may_go_on, generated, claim)

    async def _try_each(
        self,
        job: Job,
        tried: Tried,
        use: Callable[[Attempt], Awaitable[T]],
        may_go_on: Callable[[], bool],
        generated: Callable[[], list[int]],
        claim: Claim | None,
    ) -> T:
        instances = self._instances
        demand = await demand_of(job, instances)
        if tried.failure is None:
            route = await self._first_route(job.model, demand)
        else:
            route = await self._next_route(job.model, tried.suspects, tried.failure, demand)
        num_before, before = tried.num_attempts, job.generated
        num_planned = 0
        held: HeldKV | None = None
        for number in count(1):
            attempt = await self._attempt_of(job, route, number, before, claim, held)
            names = route.names
            try:
                with instances.health.losses.unless_lost(job.loop, names):
                    async with attempt:
                        result = await use(attempt)
                instances.health.ended(names)
                instances.pairs.worked(route.prefill, route.decode)
                return result
            except Moved:
                instances.health.ended(names)
                job.trail.attempt_failed()
                assert claim is not None, "nothing is stolen without"
                route = claim.route(route)
                continue
            except ServeError as failure:
                if isinstance(failure, InstanceStalled):
                    attempt.suspects.add(failure.name)
                planned = is_planned(failure)
                innocent = planned or attempt.is_moving or isinstance(failure, Unavailable)
                instances.health.ended(names, () if innocent else attempt.suspects)
                if not may_help(failure) or not (attempt.suspects & names or attempt.is_cut):
                    raise
                num_planned += planned or attempt.is_moving
                is_stolen = claim is not None and claim.thief is not None
                tried.num_attempts = num_before + number - is_stolen - min(num_planned, _MAX_PLANNED)
                tried.failure = failure
                if planned:  # for as long as it says so itself
                    for name in attempt.suspects:
                        instances.table.mark_lost(name)
                elif not isinstance(failure, InstanceUnreachable):  # which may be here again the next moment
                    tried.suspects.add(attempt.suspects)
                if not may_go_on() or tried.num_attempts >= instances.failover.max_attempts:
                    raise
                route = await self._next_route(job.model, tried.suspects, failure, demand)
                before = generated()
                route, held = self._way_on(attempt, failure, route, before)
            continued = bool(before) or held is not None
            job.trail.again(continued=continued)
            (instances.metrics.request_continuations if continued else instances.metrics.request_retries).inc()
        raise AssertionError("count() has no end")

    async def _first_route(self, model: str, demand: Demand) -> Route:
        policy, table = self._instances.policy, self._instances.table
        try:
            return self._route_now(model, demand)
        except Unavailable as failure:
            if (left_s := self._expected_s()) <= 0:
                raise
            nobody = Suspects(table)
            return await substitute(table, policy, model, nobody, failure, left_s, demand, is_expected=True)

    def _expected_s(self) -> float:
        """How long what is not here now is expected to come."""
        complete_at = self._instances.health.was_complete_at
        return 0.0 if complete_at is None else complete_at + self._instances.failover.wait_s - time.monotonic()

    def _route_now(self, model: str, demand: Demand) -> Route:
        policy, table = self._instances.policy, self._instances.table
        if held_back := self._instances.health.held_back():
            with suppress(Unavailable):
                return policy.choose_route(table, model, exclude=held_back, demand=demand)
        return policy.choose_route(table, model, demand=demand)

    async def _next_route(self, model: str, suspects: Suspects, failure: ServeError, demand: Demand) -> Route:
        table, policy, wait_s = self._instances.table, self._instances.policy, self._instances.failover.wait_s
        is_expected = self._expected_s() > 0
        return await substitute(table, policy, model, suspects, failure, wait_s, demand, is_expected=is_expected)

    def _way_on(
        self, attempt: Attempt, failure: ServeError, route: Route, generated: list[int]
    ) -> tuple[Route, HeldKV | None]:
        """``route``, or that of the KV, where the instance that failed the attempt has kept it."""
        held = attempt.held_after(failure)
        way = None if held is None else held.route(route)
        if way is not None:
            return way, held
        if attempt.was_left(failure, begun=bool(generated)):
            self._instances.metrics.migrations.add(1.0, "fallen_back")
        return route, None

    async def _attempt_of(
        self,
        job: Job,
        route: Route,
        number: int,
        generated: list[int],
        claim: Claim | None,
        held: HeldKV | None,
    ) -> Attempt:
        assert route.prefill.info is not None, "a ready instance has said what it is"
        fingerprint = route.prefill.info.media_fingerprint
        refs = [] if held else [await item.name(fingerprint) for item in job.items]
        return Attempt(self._instances, job, route, refs, number, generated, claim, held)

    async def _relay(
        self, attempt: Attempt, name: str, answer: Answer, progress: Progress, sink: EventSink
    ) -> None:
        """Forward the whole events of an answer as they come."""
        reader, trail = progress.reader(framed=answer.framed), attempt.trail
        read, write = reader.read, sink.outlet.write
        failure: InstanceFailed | None = None
        room = _most_bytes(attempt)

        def relay(chunk: bytes) -> bool:
            """Called for each token: it calls little."""
            nonlocal failure, room
            room -= len(chunk)
            if room < 0:
                failure = _too_long(name)
                return False
            try:
                events = read(chunk)
            except FrameError as error:
                failure = InstanceFailed(f"an instance's answer cannot be read: {error}")
                return False
            ended = progress.complete = reader.ended
            if reader.error is not None and not ended:
                failure = broke(reader.error)
            if not events:
                return failure is None
            trail.forwarded(events)
            if ended or not sink.started:
                return sink.write(events, last=ended) and failure is None
            return write(events) and failure is None

        try:
            while not await answer.forward(relay) and failure is None:
                await sink.drain()
        except InstanceLost:
            await attempt.broken_off(attempt.record(name))
            raise
        if failure is not None:
            await sink.drain()
            attempt.said(name, failure)
            raise failure

    async def _body(self, attempt: Attempt, name: str, answer: Answer) -> bytes:
        """All of an answer. Where decode follows there is none, or an error that says why not. A connection that
        breaks without one means a lost instance."""
        body, room = bytearray(), _most_bytes(attempt)
        try:
            async for chunk in answer.chunks():
                body += chunk
                if len(body) > room:
                    attempt.suspects.add(name)
                    raise _too_long(name)
        except InstanceLost:
            if not (body and answer.decode_follows):
                await attempt.broken_off(attempt.record(name))
                raise
        if body and answer.decode_follows:
            failure = error_from_response(InstanceFailed.status, bytes(body), origin=f"instance {name}")
            attempt.said(name, failure)
            raise failure
        return bytes(body)


def _most_bytes(attempt: Attempt) -> int:
    """Of an answer with all the tokens that its request may have, each as long as tokens come."""
    job, info = attempt.job, attempt.route.prefill.info
    context = attempt.route.max_model_len or (info.max_model_len if info else 1)
    num_tokens = min(job.sampling.max_tokens or context, context) + context * job.output.echo
    token_bytes = _TOKEN_BYTES * (1 if job.sampling.logprobs is None else 2 + job.sampling.logprobs)
    return _ANSWER_BYTES + job.sampling.n * num_tokens * token_bytes


def _too_long(name: str) -> InstanceFailed:
    return InstanceFailed(f"instance {name} answered with more than the request's tokens can be")
