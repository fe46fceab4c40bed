"""Requests that are wrong: a 4xx in OpenAI's shape with a sentence that helps, and nothing disturbed."""

import asyncio
import contextlib
import gc
import json
import struct
import time
import zlib

import pytest

from epd_serve.media.picture import MediaLimits, pixel_size

IMAGE_PARAM = "messages[0].content[0].image_url.url"


@pytest.fixture
async def gateway(start):
    return await start("e0:E", "p0:P", "d0:D")


async def test_an_unknown_model_is_a_404_that_names_the_known(gateway, kit):
    status, error = await gateway.error(kit.chat() | {"model": "gpt-5"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'demo'" in error["message"]


async def test_unknown_paths_and_methods_have_openais_shape(gateway, kit):
    status, error = await gateway.error(kit.chat(), "/v1/nothing")
    assert status == 404 and "/v1/nothing" in error["message"]
    async with gateway.session.get(f"{gateway.url}/v1/chat/completions") as response:
        assert response.status == 405
        assert json.loads(await response.read())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", ["a" * 300, "two words", "tab\there"])
async def test_a_request_id_that_is_no_token_is_replaced(gateway, kit, given):
    async with gateway.post(kit.chat(), headers={"x-request-id": given}) as response:
        assert response.status == 200 and response.headers["x-request-id"] != given


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png,abc",
        "data:audio/wav;base64,AAAA",
        "data:",
        "ftp://example.com/x.png",
        "x.png",
        "",
        "http://",
        "http://[::1",
        "file:///etc/passwd",
        "http://127.0.0.1:9/x.png",
    ],
)
async def test_a_bad_image_url_is_named(gateway, kit, url):
    status, error = await gateway.error(kit.chat(url))
    assert (status, error["param"]) == (400, IMAGE_PARAM)
    if url[:5] == "http:" and len(url) > 7:
        assert url in error["message"]
    assert not any(fake.calls for fake in gateway.fakes.values())


async def test_a_bomb_is_refused_before_it_is_decoded(gateway, kit):
    picture = bytearray(kit.picture())
    picture[16:24] = (10_000).to_bytes(4, "big") + (5_000).to_bytes(4, "big")
    picture[29:33] = zlib.crc32(picture[12:29]).to_bytes(4, "big")
    status, error = await gateway.error(kit.chat(kit.data_url(bytes(picture))))
    assert (status, error["param"]) == (400, IMAGE_PARAM)
    assert "50000000 pixels" in error["message"]


async def test_the_number_of_images_is_limited(start, kit):
    gateway = await start("pd0:PD", media={"max_items": 2})
    picture = kit.data_url(kit.picture())
    assert await gateway.answer(kit.chat(picture, picture)) == (200, kit.WHOLE)
    status, error = await gateway.error(kit.chat(*[picture] * 3))
    assert (status, error["param"]) == (400, "messages[0].content[2].image_url.url")
    assert "at most 2" in error["message"]


async def test_the_pixels_of_all_images_are_limited(start, kit):
    gateway = await start("pd0:PD", media={"max_pixels": 24})
    for kind in ("PNG", "WEBP"):
        picture = kit.data_url(kit.picture(6, 4, kind=kind))
        assert await gateway.answer(kit.chat(*[picture] * 4)) == (200, kit.WHOLE)
        status, error = await gateway.error(kit.chat(*[picture] * 5))
        assert (status, error["code"]) == (400, "too_many_pixels")


async def test_slow_headers_do_not_stop_the_other_requests(gateway, kit):
    """Compressed text is read beside the event loop. It takes a fifth of the CPU time that a picture may have."""

    def text(number):
        body = b"k%d\0\0" % number + zlib.compress(bytes(1_000_000), 9)
        return struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))

    head, tail = kit.picture()[:33], kit.picture()[33:]
    picture = head + b"".join(text(number) for number in range(24)) + tail
    began_s = time.thread_time()
    pixel_size(picture, MediaLimits(max_pixels=1 << 20, max_bytes=1 << 20))
    read_s = time.thread_time() - began_s
    slow = kit.data_url(picture)
    answers = [asyncio.create_task(gateway.answer(kit.chat(*[slow] * 4))) for _ in range(2)]
    longest = 0.0
    gc.collect()
    gc.disable()  # no garbage of earlier tests is collected meanwhile
    while not all(answer.done() for answer in answers):
        asked_at = time.thread_time()  # of the event loop: other processes do not count
        async with gateway.session.get(f"{gateway.url}/health/live") as response:
            assert response.status == 200
        longest = max(longest, time.thread_time() - asked_at)
    gc.enable()
    assert [await answer for answer in answers] == [(200, kit.WHOLE)] * 2
    assert longest < read_s


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", b"application/json"),
        ("/v1/audio/transcriptions", b"multipart/form-data; boundary=x"),
    ],
)
async def test_a_body_without_end_is_refused_and_then_cut_off(start, kit, monkeypatch, path, kind):
    """Its sender has the time to see the 413, and no more."""
    monkeypatch.setattr("epd_serve.rpc.bounded.GRACE_S", 0.3)
    gateway = await start("e0:E", "p0:P", "d0:D", max_body_bytes=50_000)

    async def send(writer):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)

    async with gateway.connection() as (reader, writer), asyncio.timeout(60):
        writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: %b\r\n" % (path.encode(), kind))
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(send(writer))
        assert (await reader.readline()).split()[1] == b"413"
        await sending
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
