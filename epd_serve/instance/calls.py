"""The control calls of an instance: bodies in, services called, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import msgspec

from epd_serve.errors import ServeError
from epd_serve.instance.http import JSON, Handler, Reply
from epd_serve.instance.metrics import CONTENT_TYPE
from epd_serve.protocol import instance_state, wire
from epd_serve.types import Stage

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

_DONE = Reply(status=204)


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
            ("POST", "/probe", self._probe),
            ("POST", "/stage/encode", self._encode),
            ("POST", "/stage/prefill", self._prefill),
            ("POST", "/stage/decode", self._decode),
            ("POST", "/stage/move", self._move),
            ("POST", "/prompt/tokenize", self._tokenize),
            ("POST", "/prompt/detokenize", self._detokenize),
            ("POST", "/feature/event", self._feature_event),
            ("POST", "/feature/parity", self._feature_parity),
            ("POST", "/kv/reserve", self._kv_reserve),
            ("POST", "/kv/renew", self._kv_renew),
            ("POST", "/kv/complete", self._kv_complete),
            ("POST", "/kv/cancel", self._kv_cancel),
            ("POST", "/kv/offer", self._kv_offer),
        ]

    async def _encode(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.EncodeRequest)
        is_own = request.announce_to == self._instance.url  # the last resort of a prompt that has begun here
        if not (is_own and self._instance.serving(Stage.PREFILL).prefill.is_serving(request.request_id)):
            self._instance.check_accepting()
        self._instance.check_ready()  # every role has E's stage for the worst case
        encodes = self._instance.encode
        self._instance.called(request.request_id, request.traceparent, request.ref.mm_hash)
        reports, mm_hash = self._instance.reports, request.ref.mm_hash
        with reports.call(Stage.ENCODE, request.request_id):
            is_named = reports.will_have(mm_hash)
            try:
                async with self._instance.refusals.call(lambda: is_own or encodes.has_begun(mm_hash)):
                    reply = await encodes.encode(request)
            except BaseException:
                reports.will_not_have(mm_hash)
                raise
        if not reply.cached and not is_named:
            reports.has_again(mm_hash)
        stages = self._instance.options.role.stages
        self._instance.metrics.encoded(reply.cached, instead=Stage.ENCODE not in stages)
        return Reply(body=wire.encode(reply))

    async def _prefill(self, body: bytes) -> Reply:
        self._instance.check_accepting()
        request = wire.decode(body, wire.PrefillRequest)
        self._instance.called(request.request_id, request.traceparent)
        prefills = self._instance.serving(Stage.PREFILL).prefill
        with self._instance.reports.call(Stage.PREFILL, request.request_id):
            async with self._answering(request.request_id, prefills.has_begun):
                return await prefills.prefill(request)

    async def _decode(self, body: bytes) -> Reply:
        self._instance.check_accepting()
        request = wire.decode(body, wire.DecodeRequest)
        self._instance.called(request.request_id, request.traceparent)
        decodes = self._instance.serving(Stage.DECODE).decode
        with self._instance.reports.call(Stage.DECODE, request.request_id):
            async with self._answering(request.request_id, decodes.has_begun):
                return await decodes.decode(request)

    async def _move(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.MoveRequest)
        return await self._instance.serving(Stage.DECODE).migrations.move(request)

    def _answering(self, request_id: str, has_begun: Callable[[str], bool]) -> AbstractAsyncContextManager[None]:
        """Around a call that is refused when the instance leaves, unless its answer goes elsewhere with its KV."""

        def is_held() -> bool:
            language = self._instance.language
            return language is not None and language.migrations.holds(request_id)

        return self._instance.refusals.call(lambda: has_begun(request_id), is_spared=is_held)

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
        self._instance.parity.admit(event.producer)
        await receiver.receive(event)
        return _DONE

    async def _feature_parity(self, body: bytes) -> Reply:
        self._instance.serving(Stage.PREFILL)  # as long as it has that role
        await self._instance.parity.judge(wire.decode(body, wire.ParitySample))
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
        decodes, handoff = self._instance.serving(Stage.DECODE).decode, wire.decode(body, wire.Handoff)
        # a long answer that goes on here takes a while to be read again
        answer = await asyncio.to_thread(decodes.replayed, handoff) if handoff.generated else None
        await decodes.take(handoff, answer)
        return _DONE

    async def _kv_cancel(self, body: bytes) -> Reply:
        self._instance.serving(Stage.DECODE).decode.cancel(wire.decode(body, wire.TransferRef))
        return _DONE

    async def _kv_offer(self, body: bytes) -> Reply:
        taken = await self._instance.serving(Stage.DECODE).decode.take_offered(wire.decode(body, wire.KVOffer))
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

    async def _probe(self, body: bytes) -> Reply:
        """Compute something; 500 where that does not come to pass."""
        self._instance.check_ready()
        await self._instance.probe(wire.decode(body, instance_state.ProbeRequest).timeout_s)
        return Reply(status=204)

    async def _metrics(self, body: bytes) -> Reply:
        self._instance.check_ready()
        headers = ((b"content-type", CONTENT_TYPE.encode()),)
        return Reply(headers=headers, body=self._instance.render_metrics())
