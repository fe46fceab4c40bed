"""The short way through a body with images and the plain way are one: same calls to instances, same refusals."""

from __future__ import annotations

import base64
import io
import json
from random import Random

import pytest
from gateway_settings import gateway_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sounds import sound

from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol import wire
from epd_serve.protocol.openai.generation import ChatCompletionRequest
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import encode_in_parts
from proxy.api import payloads
from proxy.api.payloads import ParsedBody
from proxy.media.loader import MediaLoader
from proxy.media.probe import MediaProbe
from proxy.settings import Current


class _NoFetcher:
    async def fetch(self, url: str, asker: str) -> bytes:
        raise InvalidRequest(f"{url} is not to be fetched")


def loader_of(max_body_bytes: int, **media: int) -> MediaLoader:
    settings = Current(gateway_settings(max_body_bytes=max_body_bytes, media={"max_items": 8, **media}))
    return MediaLoader(settings, _NoFetcher(), MediaProbe(settings))  # type: ignore[arg-type]


def _picture(kind: str, nbytes: int) -> bytes:
    side = max(2, round((nbytes / 3) ** 0.5))
    buffer = io.BytesIO()
    noise = Random(1).randbytes(side * side * 3)
    Image.frombytes("RGB", (side, side), noise).save(buffer, kind)
    return buffer.getvalue()


PICTURES = [_picture("PNG", 6000), _picture("JPEG", 12_000), _picture("PNG", 40), _picture("GIF", 9000)]
ENCODED = [base64.b64encode(picture).decode() for picture in PICTURES]
HEADERS = ["data:image/png;base64,", "data:;base64,", "DATA:image/jpeg;base64,", "data:image/png;a=b;base64,"]
WRONG_HEADERS = [
    "data:image/png,;base64,",
    "data:text/html;base64,",
    "x;base64,",
    "data:image/png;base64 ,",
    ";base64,",
]


async def _upstream(body: bytes, *, cut: bool) -> list[bytes] | str:
    """The bytes of all stage calls for a body, or its refusal; without ``cut`` it is parsed as it is."""
    loader = loader_of(400_000, max_bytes=200_000)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if not cut:
                patch.setattr(payloads, "_cut", lambda body: None)
            parsed = ParsedBody(ChatCompletionRequest.parse, bytearray(body))
        request = parsed.request
        items = await parsed.load(loader.load)
    except ServeError as error:
        return f"{type(error).__name__}: {error.to_json().decode()}"
    finally:
        loader._probe.close()
    refs = [await item.name("f00d") for item in items]
    prefill = wire.PrefillRequest(
        request_id="r",
        output=request.output(id="i", created=1, model="demo"),
        sampling=request.sampling(1),
        items=refs,
        messages=request.chat(),
    )
    encodes = [
        wire.EncodeRequest(request_id="r", ref=ref, media=item.data, announce_to="http://p")
        for ref, item in zip(refs, items, strict=True)
    ]
    for one in encodes:
        assert b"".join(encode_in_parts(one)) == wire.encode(one)
    return [wire.encode(prefill), *map(wire.encode, encodes)]


async def test_sounds_are_cut_out_as_pictures_are() -> None:
    text = base64.b64encode(sound(1, 0.2)).decode()
    for data in (text, text[:-1], text + '"', "AA" * 600):
        parts = [
            {"type": "input_audio", "input_audio": {"format": "wav", "data": data}},
            {"type": "image_url", "image_url": {"url": HEADERS[0] + ENCODED[0]}},
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        ]
        body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
        assert await _upstream(body, cut=True) == await _upstream(body, cut=False)
        parsed = ParsedBody(ChatCompletionRequest.parse, bytearray(body), only_little=True)
        assert parsed.text_bytes < 1000 or '"' in data


class _Writer:
    """Writes chat requests as JSON texts, nearly all of them nearly right."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def body(self) -> bytes:
        chosen = self._random
        messages = ",".join(self._message() for _ in range(chosen.randint(1, 2)))
        members = [self._member("messages", f"[{messages}]")]
        if chosen.random() < 0.3:
            members.append(self._member("user", self._quoted(self._words())))
        if chosen.random() < 0.1:
            name = chosen.choice(["nonsense", "model", "stop"])
            members.append(self._member(name, self._quoted(self._words())))
        body = bytearray(self._object(*members).encode("utf-8", "surrogatepass"))
        if chosen.random() < 0.15:  # one byte lost, doubled or replaced
            place = chosen.randrange(len(body))
            old = bytes(body[place : place + 1])
            body[place : place + 1] = chosen.choice([b"", old * 2, b"\\", b'"', b"\xff", b"\x00", b"}"])
        return bytes(body)

    def _message(self) -> str:
        if self._random.random() < 0.2:
            content = self._quoted(self._words())
        else:
            content = "[" + ",".join(self._part() for _ in range(self._random.randint(1, 3))) + "]"
        return self._object(self._member("role", '"user"'), self._member("content", content))

    def _part(self) -> str:
        if self._random.random() < 0.6:
            url = self._member("url", self._quoted(self._url()))
            more = [self._member("detail", '"auto"')] if self._random.random() < 0.3 else []
            image = self._member("image_url", self._object(url, *more))
            return self._object(self._member("type", '"image_url"'), image)
        return self._object(self._member("type", '"text"'), self._member("text", self._quoted(self._words())))

    def _url(self) -> str:
        chosen = self._random
        text = chosen.choice(ENCODED)
        place = chosen.randrange(len(text))
        damage = chosen.choice([""] * 10 + ["character", "padding", "newline", "tail", "text", "blank"])
        if damage == "character":
            text = text[:place] + chosen.choice("-_!é\u2028") + text[place:]
        elif damage == "padding":
            text = text[: len(text) - chosen.randint(1, 3)]
        elif damage == "newline":
            text = text[:place] + "\n" + text[place:]
        elif damage == "tail":
            text += chosen.choice(["=", "AAAA", '"', "\\", ";base64," + text])
        elif damage == "text":
            text = "A" * chosen.choice([0, 4, 2000])
        elif damage == "blank":
            text += " "
        return chosen.choice(HEADERS * 4 + WRONG_HEADERS) + text

    def _words(self) -> str:
        kind = self._random.randrange(6)
        if kind == 0:
            return self._url()
        if kind == 1:
            return json.dumps({"image_url": {"url": self._url()}})
        if kind == 2:
            return payloads._PLACEHOLDER + "0"
        return "".join(self._random.choice('aé\u2028\ud83d\ude00😀"\\\n\t/:,{}[]') for _ in range(kind * 3))

    def _quoted(self, text: str) -> str:
        """A JSON string, with more escapes than it needs now and then."""
        quoted = json.dumps(text, ensure_ascii=self._random.random() < 0.5)
        return quoted.replace("/", "\\/") if self._random.random() < 0.1 else quoted

    def _member(self, key: str, value: str) -> str:
        a, b, c, d = (self._random.choice(["", "", "", " ", "\n\t", "\r\n"]) for _ in range(4))
        return f'{a}"{key}"{b}:{c}{value}{d}'

    def _object(self, *members: str) -> str:
        chosen = self._random.sample(members, len(members))
        if self._random.random() < 0.03:
            chosen.append(self._random.choice(chosen))
        return "{" + ",".join(chosen) + "}"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64))
async def test_both_ways_through_a_body_are_one(seed):
    body = _Writer(Random(seed)).body()
    assert await _upstream(body, cut=True) == await _upstream(body, cut=False)


async def test_what_the_examples_are_about_happens():
    """Plain data URLs go the short way, and only these."""
    plain = json.dumps({"messages": [{"role": "user", "content": [_image(HEADERS[0] + ENCODED[0])]}]}).encode()
    wanted = await _upstream(plain, cut=False)
    for changed in (plain, plain.replace(b"data:", b"\\u0064ata:"), plain.replace(b"image/png", b"image\\/png")):
        assert ParsedBody(ChatCompletionRequest.parse, bytearray(changed))._is_cut
        assert await _upstream(changed, cut=True) == wanted
    in_text = json.dumps({"messages": [{"role": "user", "content": HEADERS[0] + ENCODED[0]}]}).encode()
    assert not ParsedBody(ChatCompletionRequest.parse, bytearray(in_text))._is_cut


async def test_the_body_is_let_go_of():
    body = bytearray(
        json.dumps({"messages": [{"role": "user", "content": [_image(HEADERS[0] + ENCODED[1])]}]}).encode()
    )
    parsed = ParsedBody(ChatCompletionRequest.parse, body)
    assert body
    await parsed.load(loader_of(1 << 20).load)
    assert not body


@pytest.mark.parametrize("nbytes", [6000, 2_000_000])
@pytest.mark.parametrize("low_detail", [False, True])
async def test_an_item_that_is_named_early_has_the_same_name(nbytes, low_detail):
    loader = loader_of(1 << 24)
    url = HEADERS[0] + base64.b64encode(_picture("PNG", nbytes)).decode()
    sources = [MediaSource(url=url, param="", low_detail=low_detail)]
    [early], [late] = await loader.load(sources, "f00d"), await loader.load(sources)
    assert early.ref.mm_hash and not late.ref.mm_hash
    for fingerprint in ("f00d", "another"):
        assert await early.name(fingerprint) == await late.name(fingerprint)
    assert await early.name("f00d") != await early.name("another")


def _image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65535, 65536, 70000])
def test_a_media_item_is_sent_as_it_would_be_encoded(size):
    ref = wire.MediaRef(mm_hash="00" * 32, width=1, height=2)
    request = wire.EncodeRequest(request_id="r", ref=ref, media=bytes(size), announce_to="http://p")
    assert b"".join(encode_in_parts(request)) == wire.encode(request)
