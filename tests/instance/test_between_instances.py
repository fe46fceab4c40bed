"""Answers of several instances are those of one: wherever one goes on with them, and however few blocks D has."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
from fleet import Books, figures
from in_process import serving
from item_bodies import whole_items
from pictures import QUESTIONS, noise, png
from PIL import Image
from program import until
from reference import Reference

from epd_serve.errors import InvalidRequest
from epd_serve.instance.instance import Instance
from epd_serve.protocol import wire
from epd_serve.rpc import items
from epd_serve.rpc.server import Pieces, Reply
from epd_serve.types import SamplingParams

Frame = tuple[int, list[int], bytes]
_CACHED = re.compile(rb',"prompt_tokens_details":\{[^}]*\}')


def request(
    kind: Any = "chat", *pictures: Image.Image, text: str = "What is this apple?", **sampling: Any
) -> wire.PrefillRequest:
    parts = [wire.Part(type="image")] * len(pictures) + [wire.Part(type="text", text=text)]
    return wire.PrefillRequest(
        request_id="r",
        output=wire.OutputOptions(kind, "r", 0, "tiny", stream=True, include_usage=True, continuous_usage=True),
        sampling=SamplingParams(**({"seed": 7, "max_tokens": 21, "ignore_eos": True} | sampling)),
        items=[wire.MediaRef(f"{hash(one.tobytes()):016x}" * 4, one.width, one.height) for one in pictures],
        messages=[wire.ChatMessage(role="user", content=parts)] if kind == "chat" else None,
        prompt=None if kind == "chat" else "apple banana cherry " * 3,
    )


async def frames_of(reply: Reply) -> list[Frame]:
    body = reply.body
    if isinstance(reply.stream, Pieces):
        body = await reply.stream.read()
    elif reply.stream is not None:
        body = b"".join([piece async for piece in reply.stream])
    if reply.on_close is not None:
        reply.on_close()
    return whole_items(body)


async def ask(
    name: str,
    wanted: wire.PrefillRequest,
    *pictures: Image.Image,
    prefill: Instance,
    decode: Instance | None,
    encoding: asyncio.Event | None = None,
) -> list[Frame]:
    """As a gateway does; encodes wait for ``encoding``."""

    async def encode(ref: wire.MediaRef, picture: Image.Image) -> None:
        if encoding is not None:
            await encoding.wait()
        call = wire.EncodeRequest(request_id=name, ref=ref, media=png(picture), announce_to=prefill.url)
        await prefill.encoder.encode(call)

    wanted = msgspec.structs.replace(wanted, request_id=name, decode_url=decode.url if decode else None)
    decoding: asyncio.Task[Reply] | None = None
    async with asyncio.TaskGroup() as tasks:
        if decode is not None:
            expect = wire.DecodeRequest(name, stream=True)
            decoding = tasks.create_task(decode.require_decoder().decode(expect))
        for ref, picture in zip(wanted.items, pictures, strict=True):
            tasks.create_task(encode(ref, picture))
        reply = await prefill.require_prefiller().prefill(wanted)
        answer = await frames_of(reply)
        if decoding is not None and (wire.NEXT_HEADER.encode(), b"none") in reply.headers:
            decoding.cancel()
    return answer if decoding is None or decoding.cancelled() else answer + await frames_of(decoding.result())


def tokens(answer: list[Frame]) -> list[int]:
    return [token for _, ids, _ in answer for token in ids]


def text_of(answer: list[Frame]) -> str:
    events = [json.loads(event[6:]) for choice, _, event in answer if choice == 0]
    choices = [event["choices"][0] for event in events]
    return "".join(one["delta"]["content"] if "delta" in one else one["text"] for one in choices)


def comparable(answer: list[Frame]) -> list[Any]:
    """Without what depends on other requests: log-probabilities, by the rounding of other batches, and the tokens
    that were in the prefix cache."""
    told = []
    for choice, ids, event in answer:
        event = _CACHED.sub(b"", event)
        parsed = json.loads(event[6:]) if choice == 0 else event
        if choice == 0 and (logprobs := parsed["choices"][0]["logprobs"]):
            if "content" in logprobs:
                assert all(token["logprob"] <= 0 for token in logprobs["content"])
                parsed["choices"][0]["logprobs"] = [token["bytes"] for token in logprobs["content"]]
            else:
                assert all(value <= 0 for value in logprobs.pop("token_logprobs"))
                logprobs["top_logprobs"] = [list(top) for top in logprobs["top_logprobs"]]
        told.append((choice, ids, parsed))
    return told


async def test_an_answer_goes_on_from_any_token(tmp_path: Path) -> None:
    path, picture = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model"), noise(1)
    async with (
        serving(path, "EPD") as fused,
        serving(path, "EP") as prefill,
        serving(path, "D") as decode,
    ):
        plain = await ask("plain", request(temperature=0.0), prefill=fused, decode=None)
        stop = text_of(plain)[-9:-5]
        wanted = [
            request("chat", picture, temperature=0.0),
            request(temperature=0.0, stop=(stop,)),
            request("chat", picture, temperature=1.5, presence_penalty=0.5, frequency_penalty=1.0, min_tokens=5),
            request("completion", temperature=1.5, logprobs=2, repetition_penalty=1.3, skip_special_tokens=False),
            request("chat", temperature=1.8, logprobs=1, stop=("\N{REPLACEMENT CHARACTER}never",), max_tokens=40),
        ]
        for number, one in enumerate(wanted):
            shown = [picture] * len(one.items)
            whole = await ask(f"{number}", one, *shown, prefill=fused, decode=None)
            assert whole[-1][0] == items.END and whole[-1][2].endswith(b"data: [DONE]\n\n")
            ids = tokens(whole)
            assert len(ids) == 21 or one.sampling.stop
            held = [i for i, (_, _, event) in enumerate(whole[:-1], start=1) if not text_of([(0, [], event)])]
            for place, count in enumerate((0, 1, 2, 9, len(ids) - 1, len(ids), *held[:2])):
                behind = msgspec.structs.replace(one, generated=ids[:count])
                at = (fused, None) if place % 2 else (prefill, decode)
                rest = await ask(f"{number}-{place}", behind, *shown, prefill=at[0], decode=at[1])
                assert comparable(rest) == comparable(whole[count:]), (one, count, place)
        await Books({"epd": fused.url, "ep": prefill.url, "d": decode.url}).check()
        with pytest.raises(InvalidRequest):
            await fused.require_prefiller().prefill(msgspec.structs.replace(request(n=2), generated=[5]))


async def test_a_small_decode_instance_answers_all_at_once(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(path)
    expected = [reference.generate(text, images, max_tokens=40) for text, images in QUESTIONS]
    async with (
        serving(path, "EP") as prefill,
        serving(path, "D", num_blocks=28) as decode,
    ):
        for number in range(10):  # until they meet at the decode instance
            answers = await asyncio.gather(
                *(
                    ask(
                        f"{number}-{i}",
                        request("chat", *images, text=text, temperature=0.0, max_tokens=40),
                        *images,
                        prefill=prefill,
                        decode=decode,
                    )
                    for i, (text, images) in enumerate(QUESTIONS)
                )
            )
            assert list(map(tokens, answers)) == expected
            num_preemptions = (await figures(decode.url))["preemptions_total"]
            if num_preemptions:
                break
        assert num_preemptions
        await Books({"ep": prefill.url, "d": decode.url}).check()


async def test_pictures_that_wait_for_their_encoder_keep_no_place_at_the_decode_instance(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference, picture, encoding = Reference(path), noise(1), asyncio.Event()
    async with serving(path, "EP") as prefill, serving(path, "D", max_num_seqs=2) as decode:
        wanted = request(text="Which fruit?", temperature=0.0)
        shown = request("chat", picture, text="Which fruit?", temperature=0.0)
        waiting = [
            asyncio.create_task(ask(f"{i}", shown, picture, prefill=prefill, decode=decode, encoding=encoding))
            for i in range(5)
        ]
        await until(lambda: prefill.in_use()["prompts"] == 5 and not prefill.in_use()["preparations"])
        answer = await asyncio.wait_for(ask("text", wanted, prefill=prefill, decode=decode), 60)
        assert tokens(answer) == reference.generate("Which fruit?", [], max_tokens=21)
        assert prefill.in_use()["prompts"] == 5 and decode.in_use()["reservations"] == 0
        waiting.pop().cancel()
        encoding.set()
        expected = reference.generate("Which fruit?", [picture], max_tokens=21)
        assert [tokens(answer) for answer in await asyncio.gather(*waiting)] == [expected] * 4
        await Books({"ep": prefill.url, "d": decode.url}).check()
