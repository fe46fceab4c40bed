"""Runs a request on the instances: choose, send, forward; once more on others where nothing was sent yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from epd_serve.backends.base import Answer, InstanceLost
from epd_serve.errors import InstanceFailed, Unavailable
from epd_serve.routing.policy import Route
from proxy.attempt import Attempt, Instances, Job
from proxy.sink import EventSink

T = TypeVar("T")


class Generator:
    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def stream(self, job: Job, sink: EventSink) -> None:
        """Write the answer's events to ``sink``. Raises ServeError, before or after ``sink.started``."""

        async def forward(attempt: Attempt) -> None:
            sink.restart()
            answer = await attempt.first()
            if not answer.decode_follows:
                await attempt.close_decode()
            await self._relay(attempt, attempt.route.prefill.name, answer, sink)
            if answer.decode_follows:
                answer = await attempt.rest()
                await self._relay(attempt, attempt.route.decode.name, answer, sink)
            sink.check_complete()

        await self._try(job, forward, lambda: not sink.started)

    async def whole(self, job: Job) -> bytes:
        """The answer's JSON. Raises ServeError."""

        async def collect(attempt: Attempt) -> bytes:
            answer = await attempt.first()
            name = attempt.route.prefill.name
            if answer.decode_follows:
                # P's empty body ends when it has handed over; a break in it must not leave us waiting for D.
                async for _ in self._chunks(attempt, name, answer.chunks(), None):
                    raise InstanceFailed(f"instance {name} answered although decode follows")
                answer = await attempt.rest()
                name = attempt.route.decode.name
            else:
                await attempt.close_decode()
            body = b"".join([chunk async for chunk in self._chunks(attempt, name, answer.chunks(), None)])
            if not body:
                raise InstanceFailed(f"instance {name} gave an empty answer")
            return body

        return await self._try(job, collect, lambda: True)

    async def _try(self, job: Job, use: Callable[[Attempt], Awaitable[T]], may_repeat: Callable[[], bool]) -> T:
        instances = self._instances
        route = instances.policy.choose_route(instances.table, job.model)
        suspects: set[str] = set()
        try:
            return await self._attempt(job, route, 1, use, suspects)
        except InstanceFailed as failure:
            if not may_repeat() or not suspects & route.names:
                raise
            try:
                route = instances.policy.choose_route(instances.table, job.model, exclude=suspects)
            except Unavailable:
                raise failure from None
        instances.metrics.request_retries.inc()
        return await self._attempt(job, route, 2, use, suspects)

    async def _attempt(
        self, job: Job, route: Route, number: int, use: Callable[[Attempt], Awaitable[T]], suspects: set[str]
    ) -> T:
        """One attempt; the instances that it lost are added to ``suspects``."""
        assert route.prefill.info is not None, "a ready instance has said what it is"
        fingerprint = route.prefill.info.media_fingerprint
        refs = [await item.name(fingerprint) for item in job.items]
        attempt = Attempt(self._instances, job, route, refs, number)
        try:
            async with attempt:
                return await use(attempt)
        finally:
            suspects |= attempt.suspects

    async def _relay(self, attempt: Attempt, name: str, answer: Answer, sink: EventSink) -> None:
        """Forward an answer's bytes as they come. What breaks off means what it does in :meth:`_chunks`."""
        try:
            while not await answer.forward(sink.write):
                await sink.drain()
        except InstanceLost:
            if not sink.ends_in_error:
                await attempt.broken_off(self._instances.table[name])
            raise

    async def _chunks(
        self, attempt: Attempt, name: str, chunks: AsyncIterator[bytes], sink: EventSink | None
    ) -> AsyncIterator[bytes]:
        """An answer's bytes. A connection that breaks means a lost instance, unless it broke off on purpose, as an
        instance does after an error event."""
        try:
            async for chunk in chunks:
                yield chunk
        except InstanceLost:
            if sink is None or not sink.ends_in_error:
                await attempt.broken_off(self._instances.table[name])
            raise
