"""The control calls of an instance: bodies in, services called, answers out; and which it refuses as it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from epd_serve.errors import DRAINING, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.metrics import CONTENT_TYPE
from epd_serve.protocol import wire
from epd_serve.rpc.server import JSON, Handler, Reply
from epd_serve.types import Stage

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

_DONE = Reply()


@dataclass(eq=False, slots=True)
class _Call:
    scope: asyncio.Timeout
    has_begun: Callable[[], bool]


def left(name: str) -> Unavailable:
    """Return the error of a call that is refused: another instance takes it."""
    return Unavailable(f"instance {name} is leaving its role", code=DRAINING)


def moved(name: str) -> InstanceFailed:
    """Return the error of an answer that has begun: another instance goes on with it."""
    return InstanceFailed(f"instance {name} is leaving its role", code=DRAINING)


class Refusals:
    """The calls of one instance that have no answer yet. It belongs to the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[_Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def call(
        self,
        has_begun: Callable[[], bool],
        refusal: Callable[[str], ServeError] = left,
    ) -> AsyncGenerator[None]:
        """Around what answers a call; it is cancelled, and raises ``refusal``, when it is refused.

        Args:
            has_begun: whether anything was computed for it.
        """
        call: _Call | None = None
        try:
            async with asyncio.timeout(None) as scope:
                call = _Call(scope, has_begun)
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except TimeoutError:
            if call is not None and call.scope.expired():
                raise refusal(self._name) from None
            raise

    def refuse(self, *, begun: bool) -> None:
        """Refuse the calls that have not begun; with ``begun``, all."""
        now = asyncio.get_running_loop().time()
        for call in [call for call in self._calls if begun or not call.has_begun()]:
            if not call.scope.expired():
                call.scope.reschedule(now)


class CleanUps:
    """Clean-ups in the background. It belongs to the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, clean_up: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(clean_up)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """End those that are under way."""
        for task in list(self._tasks):
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Return when all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ControlCalls:
    """Everything that gateways and other instances ask: the table in :mod:`epd_serve.protocol.wire`."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [
            ("GET", "/health", self._health),
            ("GET", "/health/live", self._live),
            ("GET", "/info", self._info),
            ("GET", "/integrity", self._integrity),
            ("GET", "/metrics", self._metrics),
            ("POST", "/stage/encode", self._encode),
            ("POST", "/stage/prefill", self._prefill),
            ("POST", "/stage/decode", self._decode),
            ("POST", "/prompt/tokenize", self._tokenize),
            ("POST", "/prompt/detokenize", self._detokenize),
            ("POST", "/feature/event", self._feature_event),
            ("POST", "/kv/reserve", self._kv_reserve),
            ("POST", "/kv/renew", self._kv_renew),
            ("POST", "/kv/complete", self._kv_complete),
            ("POST", "/kv/cancel", self._kv_cancel),
            ("POST", "/kv/announce", self._kv_announce),
        ]

    async def _encode(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.EncodeRequest)
        is_own = request.announce_to == self._instance.url  # the last resort of a prompt that has begun here
        if not (is_own and self._instance.serving(Stage.PREFILL).prefill.is_serving(request.request_id)):
            self._instance.check_accepting()
        encodes = self._instance.encode  # every role has E's stage for the worst case
        reports, mm_hash = self._instance.reports, request.ref.mm_hash
        self._instance.telemetry.add_call(request.request_id, request.traceparent, mm_hash)
        reports.add_call(Stage.ENCODE, request.request_id)
        reports.add_feature(mm_hash)
        try:
            async with self._instance.refusals.call(lambda: is_own or encodes.has_begun(mm_hash)):
                reply = await encodes.encode(request)
        except BaseException:
            reports.drop_feature(mm_hash)
            raise
        stages = self._instance.options.role.stages
        self._instance.telemetry.metrics.encoded(reply.cached, instead=Stage.ENCODE not in stages)
        return Reply(body=wire.encode(reply))

    async def _prefill(self, body: bytes) -> Reply:
        self._instance.check_accepting()
        request = wire.decode(body, wire.PrefillRequest)
        language, request_id = self._instance.serving(Stage.PREFILL), request.request_id
        self._instance.telemetry.add_call(request_id, request.traceparent)
        self._instance.reports.add_call(Stage.PREFILL, request_id)
        async with self._instance.refusals.call(partial(language.prefill.has_begun, request_id)):
            return await language.prefill.prefill(request)

    async def _decode(self, body: bytes) -> Reply:
        self._instance.check_accepting()
        request = wire.decode(body, wire.DecodeRequest)
        language, request_id = self._instance.serving(Stage.DECODE), request.request_id
        self._instance.telemetry.add_call(request_id, request.traceparent)
        self._instance.reports.add_call(Stage.DECODE, request_id)
        async with self._instance.refusals.call(partial(language.decode.has_begun, request_id)):
            return await language.decode.decode(request)

    async def _tokenize(self, body: bytes) -> Reply:
        reply = await self._instance.serving(Stage.PREFILL).prefill.tokenize(
            wire.decode(body, wire.TokenizeRequest)
        )
        return Reply(body=wire.encode(reply))

    async def _detokenize(self, body: bytes) -> Reply:
        reply = await self._instance.serving(Stage.PREFILL).prefill.detokenize(
            wire.decode(body, wire.DetokenizeRequest)
        )
        return Reply(body=wire.encode(reply))

    async def _feature_event(self, body: bytes) -> Reply:
        receiver = self._instance.serving(Stage.PREFILL).receiver
        event = wire.decode(body, wire.FeatureEvent)
        self._instance.telemetry.metrics.feature_came(event.producer)
        await receiver.receive(event)
        return _DONE

    async def _kv_reserve(self, body: bytes) -> Reply:
        self._instance.check_accepting()
        request = wire.decode(body, wire.ReserveRequest)
        async with self._instance.refusals.call(lambda: True):
            reply = await self._instance.serving(Stage.DECODE).decode.reserve(request)
        return Reply(body=wire.encode(reply))

    async def _kv_renew(self, body: bytes) -> Reply:
        self._instance.serving(Stage.DECODE).decode.renew(wire.decode(body, wire.TransferRef))
        return _DONE

    async def _kv_complete(self, body: bytes) -> Reply:
        await self._instance.serving(Stage.DECODE).decode.complete(wire.decode(body, wire.Handoff))
        return _DONE

    async def _kv_cancel(self, body: bytes) -> Reply:
        self._instance.serving(Stage.DECODE).decode.cancel(wire.decode(body, wire.TransferRef))
        return _DONE

    async def _kv_announce(self, body: bytes) -> Reply:
        announcement = wire.decode(body, wire.KVAnnouncement)
        taken = await self._instance.serving(Stage.DECODE).decode.read_kv(announcement)
        return Reply(body=wire.encode(taken))

    # ------------------------------------------------------------------ how it is

    async def _health(self, body: bytes) -> Reply:
        self._instance.check_ready()
        return Reply(headers=(JSON,), body=b'{"status":"ok"}')

    async def _live(self, body: bytes) -> Reply:
        """It answers, be it loading its model or draining: to start it again would not help."""
        return Reply(headers=(JSON,), body=b'{"status":"live"}')

    async def _info(self, body: bytes) -> Reply:
        return Reply(headers=(JSON,), body=msgspec.json.encode(self._instance.info()))

    async def _integrity(self, body: bytes) -> Reply:
        """Check every cache's books; the answer lists what is in use, all zero on an idle instance."""
        self._instance.check_ready()
        try:
            self._instance.check_integrity()
        except AssertionError as error:
            raise ServeError(f"the books do not balance: {error}", code="integrity") from error
        return Reply(headers=(JSON,), body=msgspec.json.encode(self._instance.in_use()))

    async def _metrics(self, body: bytes) -> Reply:
        self._instance.check_ready()
        headers = ((b"content-type", CONTENT_TYPE.encode()),)
        return Reply(headers=headers, body=self._instance.render_metrics())
