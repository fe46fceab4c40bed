"""The base64 text of images, cut out of a request's body before its JSON is parsed.

Nearly all of a body with images is base64, and a JSON parser would look at each of its characters, copy them, and
the data URL's decoder would copy them again. So the body is parsed with a short placeholder in place of each
payload. What is decoded and checked afterwards is the body's own bytes.

This changes nothing of what a request means. A payload is a run of characters up to the next quotation mark.
Either it is what it looks like, the end of a data URL with nothing but base64 in it, or the body is parsed as it
is. The request says which: each placeholder must be the end of one image's URL, in order, and each payload must be
valid base64, which neither ends nor changes a JSON string. Placeholders contain a random number, so that no body
can have one of its own. Whatever is refused, is refused for what the body as it is has wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from msgspec.structs import replace

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.messages import MediaSource
from epd_serve.protocol.openai import GenerationRequest

_MARK = b";base64,"
#: Shorter ones are left in: they are parsed as fast as they are cut out.
_MIN_BYTES = 1024
_PLACEHOLDER = f"payload-{secrets.token_hex(16)}-"

R = TypeVar("R", bound=GenerationRequest)
Item = TypeVar("Item")
Parse = Callable[[bytes | bytearray], R]


class ParsedBody(Generic[R]):
    """A request and its media.

    Attributes:
        text_bytes: length of the body without the media.
    """

    def __init__(self, parse: Parse[R], body: bytearray, *, cut: bool = True) -> None:
        """Takes the body over. ``cut=False`` goes the plain way. Raises InvalidRequest."""
        self._parse = parse
        self._body = body
        short = self._parse_cut() if cut else None
        if short is None:
            self.request = parse(body)
            self._sources = self.request.media()
        else:
            self.request, self._sources = short
        self._is_cut = short is not None
        self.text_bytes = len(body) - sum(len(one.url) + len(one.payload or b"") for one in self._sources)
        if not self._is_cut:
            body.clear()

    @property
    def has_media(self) -> bool:
        return bool(self._sources)

    async def load(self, load: Callable[[list[MediaSource]], Awaitable[list[Item]]]) -> list[Item]:
        """What ``load`` makes of the media; the body is let go of. Raises what ``load`` does."""
        if not self._is_cut:
            return await load(self._sources)
        try:
            items = await load(self._sources)
        except InvalidRequest:
            return await load(self._parse(self._body).media())
        for source in self._sources:
            if source.payload is not None:
                source.payload.release()
        self._body.clear()
        return items

    def _parse_cut(self) -> tuple[R, list[MediaSource]] | None:
        cut = _cut(self._body)
        if cut is None:
            return None
        skeleton, payloads = cut
        try:
            request = self._parse(skeleton)
        except InvalidRequest:
            return None
        sources = _with_payloads(request.media(), payloads)
        return None if sources is None else (request, sources)


def _cut(body: bytearray) -> tuple[bytes, list[memoryview]] | None:
    """The body with placeholders, and what they stand for; None where there is nothing to gain."""
    mark = body.find(_MARK)
    if mark < 0:
        return None
    view, rest = memoryview(body).toreadonly(), 0
    pieces: list[memoryview | bytes] = []
    payloads: list[memoryview] = []
    while mark >= 0:
        start = mark + len(_MARK)
        end = body.find(b'"', start)
        if end < 0:
            return None
        if end - start >= _MIN_BYTES:
            pieces += (view[rest:start], f"{_PLACEHOLDER}{len(payloads)}".encode())
            payloads.append(view[start:end])
            rest = end
        mark = body.find(_MARK, end)
    if not payloads:
        return None
    pieces.append(view[rest:])
    return b"".join(pieces), payloads


def _with_payloads(sources: list[MediaSource], payloads: list[memoryview]) -> list[MediaSource] | None:
    """The sources with their payloads; None unless every payload has its place."""
    found = 0
    for index, source in enumerate(sources):
        header, is_cut, number = source.url.partition(_PLACEHOLDER)
        if is_cut:
            is_data = header[:5].lower() == "data:" and header.find(",") == len(header) - 1
            if found == len(payloads) or number != str(found) or not is_data:
                return None
            sources[index] = replace(source, url=header, payload=payloads[found])
            found += 1
    return sources if found == len(payloads) else None
