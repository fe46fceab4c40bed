"""``POST /tokenize`` and ``/detokenize``: one question to an instance that prefills, asked when its turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from epd_serve.backends.base import InstanceLost, StageCalls
from epd_serve.errors import Unavailable
from epd_serve.protocol.tokenizing import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import InstanceRecord
from epd_serve.types import Stage
from proxy.endpoint import Endpoint, Exchange
from proxy.failover import is_planned
from proxy.payloads import parsed
from proxy.sink import EventSink, send_json


class TokenizingEndpoint(Endpoint):
    """Either of them, as an ASGI application."""

    def __init__(
        self,
        *,
        parse: Callable[[bytes | bytearray], TokenizeBody | DetokenizeBody],
        calls: Mapping[str, StageCalls],
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self._parse_call = parse
        self._calls = calls

    async def _generate(self, exchange: Exchange, body: bytearray, sink: EventSink) -> None:
        request = await parsed(self._parse_call, body)
        body.clear()
        await self._poller.started()
        model = self._model(request.model)
        if (waiting := exchange.visit.admit(generates=False)) is not None:
            await exchange.wait(waiting)
        items = await self._media(exchange, request.media())
        refs = [MediaRef(mm_hash="", width=item.width, height=item.height) for item in items]
        answer = await self._ask(request, refs, model, exchange.trail.request_id)
        exchange.answered = True
        await send_json(exchange.client, 200, answer, exchange.trail)

    async def _ask(
        self, request: TokenizeBody | DetokenizeBody, refs: list[MediaRef], model: str, trace_id: str
    ) -> bytes:
        """The answer of the least loaded instance; of the next where that one is lost."""
        records = sorted(self._table.ready(Stage.PREFILL, model), key=lambda record: record.prefill_s)
        lost: InstanceLost | None = None
        for record in records:
            try:
                return await self._ask_one(record, request, refs, trace_id)
            except InstanceLost as error:
                self._poller.report_lost(record.name)
                lost = error
            except Unavailable as error:
                if not is_planned(error):
                    raise
        raise lost or Unavailable("no instance that prefills is ready; try again shortly")

    async def _ask_one(
        self,
        record: InstanceRecord,
        request: TokenizeBody | DetokenizeBody,
        refs: list[MediaRef],
        trace_id: str,
    ) -> bytes:
        calls = self._calls.get(record.name)
        if calls is None:
            raise InstanceLost(f"instance {record.name} is no longer part of the deployment")
        assert record.info is not None, "a ready instance has said what it is"
        if isinstance(request, DetokenizeBody):
            text = (await calls.detokenize(request.message(refs), trace_id=trace_id)).text
            return msgspec.json.encode(DetokenizeAnswer(prompt=text))
        reply = await calls.tokenize(request.message(refs), trace_id=trace_id)
        answer = TokenizeAnswer(len(reply.tokens), record.info.max_model_len, reply.tokens, reply.texts)
        return await asyncio.to_thread(msgspec.json.encode, answer)
