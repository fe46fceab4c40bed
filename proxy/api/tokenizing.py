"""``POST /tokenize``, ``/detokenize`` and ``/v1/responses/input_tokens``, answered by a prefill instance."""

from __future__ import annotations

import asyncio

from epd_serve.errors import InstanceLost, Unavailable
from epd_serve.protocol.openai.tokenizing import TokenQuestion
from epd_serve.protocol.wire import DetokenizeReply, DetokenizeRequest, MediaRef, TokenizeReply
from epd_serve.routing.retry import LOOK_AGAIN_S, is_planned
from epd_serve.types import Stage
from proxy.admission import Visit
from proxy.api.endpoint import Endpoint
from proxy.http.client import Client
from proxy.observe.record import RequestRecord
from proxy.serving.forwarding import EventSink


class TokenizingEndpoint(Endpoint):
    """An endpoint that asks one instance."""

    async def _generate(self, client: Client, visit: Visit, body: bytearray, sink: EventSink) -> None:
        request: TokenQuestion = await self._parse(body)
        items = await self._prepare(client.record, visit, request)
        answer = await self._ask(request, [item.ref for item in items], client.record)
        client.answered = True
        await client.send_json(200, answer)

    async def _ask(self, request: TokenQuestion, refs: list[MediaRef], record: RequestRecord) -> bytes:
        """Ask the least loaded prefill instance; wait for one as chats do."""
        fleet, trace_id = self.gateway.fleet, record.request_id
        message, lost = request.message(refs), None
        reply: TokenizeReply | DetokenizeReply
        while True:
            for one in sorted(fleet.table.ready(Stage.PREFILL, record.model), key=lambda one: one.prefill_s):
                calls = fleet.calls.get(one.name)
                if calls is None:
                    continue
                assert one.info is not None, "a ready instance has sent its info"
                try:
                    if isinstance(message, DetokenizeRequest):
                        reply = await calls.detokenize(message, trace_id=trace_id)
                    else:
                        reply = await calls.tokenize(message, trace_id=trace_id)
                    answer = request.answer(reply, one.info.max_model_len)
                    return (await asyncio.to_thread(answer.model_dump_json)).encode()
                except InstanceLost as error:
                    fleet.report_lost(one.name)
                    lost = error
                except Unavailable as error:
                    if not is_planned(error):
                        raise
            if lost is not None or not fleet.is_awaited:
                raise lost or Unavailable("no prefill instance is ready; try again shortly")
            await asyncio.sleep(LOOK_AGAIN_S)
