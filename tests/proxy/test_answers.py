"""The answers that a client gets when everything works, byte by byte."""

import re

import pytest

from epd_serve.protocol import wire
from proxy.media.loader import mm_hash


async def test_a_stream_is_the_bytes_of_p_then_of_d(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    async with gateway.post(kit.chat(stream=True), headers={"x-request-id": "mine-1"}) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "mine-1"
        assert await response.read() == kit.FIRST + kit.REST + kit.DONE
    [prefill], [decode] = gateway["p0"].got("/stage/prefill"), gateway["d0"].got("/stage/decode")
    assert prefill.request_id == decode.request_id != "mine-1"
    assert prefill.decode_url == gateway["d0"].url
    assert prefill.output.stream and decode.stream
    assert prefill.messages == [wire.ChatMessage("user", [wire.Part("text", "What is it?")])]
    assert prefill.items == [] and gateway["e0"].calls == []
    await gateway.settle()


@pytest.mark.parametrize("stream", [True, False])
async def test_d_is_cancelled_when_p_ends_the_answer(start, kit, stream):
    gateway = await start("p0:P", "d0:D")
    body = kit.sent(kit.FIRST, kit.DONE) if stream else kit.WHOLE
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [0.05, kit.NONE, body]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    status, data = await gateway.answer(kit.chat(stream=stream))
    assert (status, data) == (200, kit.FIRST + kit.DONE if stream else kit.WHOLE)
    await gateway.until(lambda: len(gateway["d0"].cancelled) == 1)
    await gateway.settle()


async def test_each_distinct_image_is_encoded_once_and_announced_to_p(start, kit):
    gateway = await start("e0:E", "e1:E", "p0:P", "d0:D")
    red, blue = kit.picture(colour="red"), kit.picture(9, 5, "blue", "JPEG")
    images = [kit.data_url(red), kit.data_url(blue, "image/jpeg"), kit.data_url(red)]
    status, data = await gateway.answer(kit.chat(*images, stream=True))
    assert (status, data) == (200, kit.FIRST + kit.REST + kit.DONE)
    [prefill] = gateway["p0"].got("/stage/prefill")
    names = [mm_hash(red, "image", "f00d"), mm_hash(blue, "image", "f00d")]
    first, second = wire.MediaRef(names[0], 6, 4), wire.MediaRef(names[1], 9, 5)
    assert prefill.items == [first, second, first]
    assert [part.type for part in prefill.messages[0].content] == ["image", "image", "image", "text"]
    # Two items, two idle encoders: each takes one.
    [at_e0], [at_e1] = gateway["e0"].got("/stage/encode"), gateway["e1"].got("/stage/encode")
    assert {at_e0.media, at_e1.media} == {red, blue}
    for encode in (at_e0, at_e1):
        assert encode.announce_to == gateway["p0"].url
        assert encode.request_id == prefill.request_id
        assert encode.ref.mm_hash == mm_hash(encode.media, "image", "f00d")


async def test_events_cut_anywhere_arrive_whole(start, kit):
    gateway = await start("pd0:PD")
    body = kit.sent(kit.FIRST, kit.REST, kit.DONE)
    pieces = [step for cut in range(0, len(body), 7) for step in (body[cut : cut + 7], 0.001)]
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, *pieces]
    async with gateway.post(kit.chat(stream=True)) as response:
        chunks = [b""]
        async for piece, ends_chunk in response.content.iter_chunks():
            chunks[-1] += piece
            if ends_chunk:
                chunks.append(b"")
    assert [chunk for chunk in chunks if chunk] == [kit.FIRST, kit.REST, kit.DONE]


async def test_models_health_and_metrics(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D")
    async with gateway.session.get(f"{gateway.url}/v1/models") as response:
        [model] = (await response.json())["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("demo", "/models/demo", 65536)
    await gateway.answer(kit.chat(kit.data_url(kit.picture()), stream=True))
    await gateway.settle()
    text = await gateway.text("/metrics")
    assert 'epd_serve_requests_total{endpoint="chat",modality="image",status="200"} 1.0' in text
    assert 'epd_serve_time_to_first_token_seconds_count{endpoint="chat",modality="image"} 1.0' in text
    assert 'epd_serve_e2e_request_latency_seconds_count{endpoint="chat",modality="image"} 1.0' in text
    assert 'epd_serve_in_flight_calls{instance="p0",stage="P"} 0.0' in text
    assert re.search(r"epd_serve_media_bytes_total{.*} [1-9]", text)


async def test_health_waits_for_the_stages_that_it_is_asked_for(start, kit):
    gateway = await start("e0:E", "p0:P", "d0:D", restart="never", probe_timeout_s=1)

    async def health(query=""):
        async with gateway.session.get(f"{gateway.url}/health{query}") as response:
            return response.status, (await response.json()).get("status")

    gateway["e0"].info["ready"] = False
    await gateway.until(lambda: not gateway.table["e0"].ready)
    assert await health() == await health("?role=D") == (200, "ready")
    assert await health("?role=EPD") == (503, "waiting for E")
    assert (await health("?role=EX"))[0] == 400
    gateway["d0"].info["ready"] = False
    await gateway.until(lambda: not gateway.table["d0"].ready)
    assert await health() == (503, "waiting for D")
    assert (await gateway.error(kit.chat()))[0] == 503
    gateway["d0"].info["ready"] = True
    await gateway.until(lambda: gateway.table["d0"].ready)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
