"""The stage calls of gateways and other instances: bodies in, services called, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from epd_serve.config import InstanceOptions
from epd_serve.instance.decode import DecodeService
from epd_serve.instance.encode import EncodeService
from epd_serve.instance.feature_supply import FeatureSupply
from epd_serve.instance.http import Handler, Reply
from epd_serve.instance.kv_delivery import Pulls
from epd_serve.instance.language_stages import LanguageStages
from epd_serve.instance.metrics import InstanceMetrics
from epd_serve.instance.prefill import PrefillService
from epd_serve.instance.refusals import Refusals
from epd_serve.instance.reports import Reporter
from epd_serve.protocol import prompt_calls, wire
from epd_serve.types import Stage

_DONE = Reply(status=204)


class Stages(Protocol):
    """Of :class:`~epd_serve.instance.instance.Instance`; Unavailable is raised for a stage that is not there."""

    options: InstanceOptions
    language: LanguageStages | None
    metrics: InstanceMetrics
    pulls: Pulls
    reports: Reporter
    refusals: Refusals
    url: str

    def check_accepting(self) -> None: ...

    def encodes(self) -> EncodeService: ...

    def prefills(self) -> PrefillService: ...

    def decodes(self) -> DecodeService: ...

    def features(self) -> FeatureSupply: ...


class StageCalls:
    """See the table in :mod:`epd_serve.protocol.wire`."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [
            ("POST", "/stage/encode", self._encode),
            ("POST", "/stage/prefill", self._prefill),
            ("POST", "/stage/decode", self._decode),
            ("POST", "/stage/move", self._move),
            ("POST", "/prompt/tokenize", self._tokenize),
            ("POST", "/prompt/detokenize", self._detokenize),
            ("POST", "/feature/event", self._feature_event),
            ("POST", "/kv/reserve", self._kv_reserve),
            ("POST", "/kv/renew", self._kv_renew),
            ("POST", "/kv/complete", self._kv_complete),
            ("POST", "/kv/cancel", self._kv_cancel),
            ("POST", "/kv/pull", self._kv_pull),
            ("POST", "/kv/pulled", self._kv_pulled),
        ]

    async def _encode(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.EncodeRequest)
        is_own = request.announce_to == self._stages.url  # the last resort of a prompt that has begun here
        if not (is_own and self._stages.prefills().is_serving(request.request_id)):
            self._stages.check_accepting()
        encodes = self._stages.encodes()
        self._stages.metrics.received(request.request_id, request.traceparent, request.ref.mm_hash)
        reports, mm_hash = self._stages.reports, request.ref.mm_hash
        with reports.call(Stage.ENCODE, request.request_id):
            is_named = reports.will_have(mm_hash)
            try:
                async with self._stages.refusals.call(lambda: is_own or encodes.has_begun(mm_hash)):
                    reply = await encodes.encode(request)
            except BaseException:
                reports.will_not_have(mm_hash)
                raise
        if not reply.cached and not is_named:
            reports.has_again(mm_hash)
        self._stages.metrics.encoded(reply.cached, instead=not self._stages.options.role.encodes)
        return Reply(body=wire.encode(reply))

    async def _prefill(self, body: bytes) -> Reply:
        self._stages.check_accepting()
        request = wire.decode(body, wire.PrefillRequest)
        self._stages.metrics.received(request.request_id, request.traceparent)
        prefills = self._stages.prefills()
        with self._stages.reports.call(Stage.PREFILL, request.request_id):
            async with self._answering(request.request_id, prefills.has_begun):
                return await prefills.prefill(request)

    async def _decode(self, body: bytes) -> Reply:
        self._stages.check_accepting()
        request = wire.decode(body, wire.DecodeRequest)
        self._stages.metrics.received(request.request_id, request.traceparent)
        decodes = self._stages.decodes()
        with self._stages.reports.call(Stage.DECODE, request.request_id):
            async with self._answering(request.request_id, decodes.has_begun):
                return await decodes.decode(request)

    async def _move(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.MoveRequest)
        self._stages.decodes()  # as long as it has that role
        assert self._stages.language is not None
        return await self._stages.language.migrations.move(request)

    def _answering(self, request_id: str, has_begun: Callable[[str], bool]) -> AbstractAsyncContextManager[None]:
        """Around a call that is refused when the instance leaves, unless its answer goes elsewhere with its KV."""

        def is_held() -> bool:
            language = self._stages.language
            return language is not None and language.migrations.holds(request_id)

        return self._stages.refusals.call(lambda: has_begun(request_id), is_spared=is_held)

    async def _tokenize(self, body: bytes) -> Reply:
        reply = await self._stages.prefills().tokenize(wire.decode(body, prompt_calls.TokenizeRequest))
        return Reply(body=wire.encode(reply))

    async def _detokenize(self, body: bytes) -> Reply:
        reply = await self._stages.prefills().detokenize(wire.decode(body, prompt_calls.DetokenizeRequest))
        return Reply(body=wire.encode(reply))

    async def _feature_event(self, body: bytes) -> Reply:
        await self._stages.features().receive(wire.decode(body, wire.FeatureEvent))
        return _DONE

    async def _kv_reserve(self, body: bytes) -> Reply:
        self._stages.check_accepting()
        request = wire.decode(body, wire.ReserveRequest)
        async with self._stages.refusals.call(lambda: True):
            reply = await self._stages.decodes().reserve(request)
        return Reply(body=wire.encode(reply))

    async def _kv_renew(self, body: bytes) -> Reply:
        self._stages.decodes().renew(wire.decode(body, wire.TransferRef))
        return _DONE

    async def _kv_complete(self, body: bytes) -> Reply:
        decodes, handoff = self._stages.decodes(), wire.decode(body, wire.Handoff)
        # a long answer that goes on here takes a while to be read again
        answer = await asyncio.to_thread(decodes.replayed, handoff) if handoff.generated else None
        await decodes.take(handoff, answer)
        return _DONE

    async def _kv_cancel(self, body: bytes) -> Reply:
        self._stages.decodes().cancel(wire.decode(body, wire.TransferRef))
        return _DONE

    async def _kv_pull(self, body: bytes) -> Reply:
        self._stages.check_accepting()
        await self._stages.decodes().pull(wire.decode(body, wire.PullRequest))
        return _DONE

    async def _kv_pulled(self, body: bytes) -> Reply:
        self._stages.pulls.confirm(wire.decode(body, wire.TransferRef))
        return _DONE
