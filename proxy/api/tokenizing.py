"""``POST /tokenize``, ``/detokenize``, ``/v1/responses/input_tokens``: a question to an instance that prefills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epd_serve.backends.base import StageCalls
from epd_serve.errors import InstanceLost, Unavailable
from epd_serve.protocol.openai.tokenizing import TokenQuestion
from epd_serve.protocol.wire import DetokenizeReply, DetokenizeRequest, MediaRef, TokenizeReply
from epd_serve.routing.retry import LOOK_AGAIN_S, is_planned
from epd_serve.types import Stage
from proxy.api.endpoint import Endpoint, Exchange, parse_body
from proxy.http.client import send_json
from proxy.serving.forwarding import EventSink


@dataclass(kw_only=True, eq=False)
class TokenizingEndpoint(Endpoint):
    """An endpoint that asks one instance."""

    parse: Callable[[bytes | bytearray], TokenQuestion]
    calls: Mapping[str, StageCalls]

    async def _generate(self, exchange: Exchange, body: bytearray, sink: EventSink) -> None:
        request = await parse_body(self.parse, body)
        await self.monitor.started.wait()
        model = exchange.record.model = self._model(request.model)
        sources = request.media()
        exchange.visit.check()
        items = await self._media(exchange, sources)
        await exchange.admit()
        refs = [item.ref for item in items]
        answer = await self._ask(request, refs, model, exchange.record.request_id)
        exchange.answered = True
        await send_json(exchange.client, 200, answer, exchange.record)

    async def _ask(self, request: TokenQuestion, refs: list[MediaRef], model: str, trace_id: str) -> bytes:
        """Return the answer of the least loaded instance that answers; wait for one as chats do."""
        message, lost = request.message(refs), None
        reply: TokenizeReply | DetokenizeReply
        while True:
            for record in sorted(self.table.ready(Stage.PREFILL, model), key=lambda record: record.prefill_s):
                calls = self.calls.get(record.name)
                if calls is None:
                    continue
                assert record.info is not None, "a ready instance is known"
                try:
                    if isinstance(message, DetokenizeRequest):
                        reply = await calls.detokenize(message, trace_id=trace_id)
                    else:
                        reply = await calls.tokenize(message, trace_id=trace_id)
                    answer = request.answer(reply, record.info.max_model_len)
                    return (await asyncio.to_thread(answer.model_dump_json)).encode()
                except InstanceLost as error:
                    self.monitor.report_lost(record.name)
                    lost = error
                except Unavailable as error:
                    if not is_planned(error):
                        raise
            if lost is not None or not self.monitor.is_awaited:
                raise lost or Unavailable("no instance that prefills is ready; try again shortly")
            await asyncio.sleep(LOOK_AGAIN_S)
