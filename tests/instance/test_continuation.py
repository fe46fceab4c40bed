"""An answer that goes on at other instances from any of its tokens is the one that the first would have given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import tiny_models
from fleet import Books
from in_process import serving
from item_bodies import whole_items
from pictures import png
from stage_requests import PICTURE, Frame, request, without_logprobs

from epd_serve.errors import InvalidRequest
from epd_serve.instance.instance import Instance
from epd_serve.protocol import wire
from epd_serve.rpc import items
from epd_serve.rpc.server import Pieces, Reply


async def frames_of(reply: Reply) -> list[Frame]:
    body = reply.body
    if isinstance(reply.stream, Pieces):
        body = await reply.stream.read()
    elif reply.stream is not None:
        body = b"".join([piece async for piece in reply.stream])
    if reply.on_close is not None:
        reply.on_close()
    return whole_items(body)


class Instances:
    def __init__(self, fused: Instance, prefill: Instance, decode: Instance) -> None:
        self._fused = fused
        self._prefill = prefill
        self._decode = decode
        self._count = 0

    async def ask(self, wanted: wire.PrefillRequest, generated: list[int], *, apart: bool) -> list[Frame]:
        """As a gateway does."""
        self._count += 1
        name, prefill = str(self._count), self._prefill if apart else self._fused
        wanted = msgspec.structs.replace(
            wanted, request_id=name, generated=generated, decode_url=self._decode.url if apart else None
        )
        async with asyncio.TaskGroup() as tasks:
            if apart:
                expect = wire.DecodeRequest(name, stream=True)
                decoding = tasks.create_task(self._decode.language.decoder.decode(expect))
            for ref in wanted.items:
                encode = wire.EncodeRequest(request_id=name, ref=ref, media=png(PICTURE), announce_to=prefill.url)
                tasks.create_task(prefill.encoder.encode(encode))
            reply = await prefill.language.prefiller.prefill(wanted)
            answer = await frames_of(reply)
            if apart and (wire.NEXT_HEADER.encode(), b"none") in reply.headers:
                decoding.cancel()
        return answer + await frames_of(decoding.result()) if apart and not decoding.cancelled() else answer


def text_of(answer: list[Frame]) -> str:
    events = [json.loads(event[6:]) for choice, _, event in answer if choice == 0]
    choices = [event["choices"][0] for event in events]
    return "".join(one["delta"]["content"] if "delta" in one else one["text"] for one in choices)


async def test_an_answer_goes_on_from_any_token(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with (
        serving(path, "EPD") as fused,
        serving(path, "EP") as prefill,
        serving(path, "D") as decode,
    ):
        instances = Instances(fused, prefill, decode)
        plain = await instances.ask(request(temperature=0.0), [], apart=False)
        stop = text_of(plain)[-9:-5]
        wanted = [
            request(temperature=0.0, image=True),
            request(temperature=0.0, stop=(stop,)),
            request(temperature=1.5, image=True, presence_penalty=0.5, frequency_penalty=1.0, min_tokens=5),
            request("completion", temperature=1.5, logprobs=2, repetition_penalty=1.3, skip_special_tokens=False),
            request("chat", temperature=1.8, logprobs=1, stop=("\N{REPLACEMENT CHARACTER}never",), max_tokens=40),
        ]
        for one in wanted:
            whole = await instances.ask(one, [], apart=False)
            assert whole[-1][0] == items.END and whole[-1][2].endswith(b"data: [DONE]\n\n")
            ids = [token for _, tokens, _ in whole for token in tokens]
            assert len(ids) == 21 or one.sampling.stop
            held = [i for i, (_, _, event) in enumerate(whole[:-1], start=1) if not text_of([(0, [], event)])]
            for place, count in enumerate((0, 1, 2, 9, len(ids) - 1, len(ids), *held[:2])):
                apart = place % 2 == 0
                rest = await instances.ask(one, ids[:count], apart=apart)
                assert without_logprobs(rest) == without_logprobs(whole[count:]), (one, count, apart)
        await Books({"epd": fused.url, "ep": prefill.url, "d": decode.url}).check()
        with pytest.raises(InvalidRequest, match="several choices"):
            await fused.language.prefiller.prefill(msgspec.structs.replace(request(n=2), generated=[5]))
