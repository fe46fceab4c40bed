"""The base64 text of media, cut out of a request's body before its JSON is parsed; a thread parses much of it.

Nearly all of a body with media is base64, and a JSON parser would look at each of its characters, copy them, and
the data URL's decoder would copy them again. So the body is parsed with a short placeholder in place of each
payload. What is decoded and checked afterwards is the body's own bytes.

This changes nothing of what a request means. A payload is a run of characters up to the next quotation mark.
Either it is what it looks like, the end of a data URL or the data of an ``input_audio`` with nothing but base64 in
it, or the body is parsed as it is. The request says which: each placeholder must be the end of one item's URL, in
order, and each payload must be valid base64, which neither ends nor changes a JSON string. Placeholders contain a
random number, so that no body can have one of its own. Whatever is refused, is refused for what the body as it is
has wrong.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec, TypeVar

from msgspec.structs import replace

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.generation import GenerationRequest
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.openai.strict_json import MAX_TEXT_BYTES
from proxy.fair_threads import FairThreads

_MARK = re.compile(rb';base64,|"data"\s{0,8}:\s{0,8}"')
_MARK_BYTES = 32
#: Shorter ones are left in: they are parsed as fast as they are cut out.
_MIN_BYTES = 1024
#: So many places are looked at for a payload; a body with more is parsed as it is.
_MAX_MARKS = 4096
_PLACEHOLDER = f"payload-{secrets.token_hex(16)}-"
#: A body that is cut, and a text with its brackets that is parsed, on the event loop: it takes a few milliseconds
#: at most. The rest is a thread's work.
_LITTLE_BODY = 4 << 20
_LITTLE_TEXT = 64 << 10
_FEW_BRACKETS = 500
#: Characters of base64 among which there are slashes, as every 64th is one.
_MANY_SLASHES = 4096
#: Bytes that are searched at once.
_PIECE = 2 << 20

R = TypeVar("R", bound=GenerationRequest)
Item = TypeVar("Item")
P = ParamSpec("P")
T = TypeVar("T")
Parse = Callable[[bytes | bytearray], R]


_thread = FairThreads("bodies", 1)


async def parsed(parse: Callable[[bytes | bytearray], T], text: bytearray, asker: str) -> T:
    """Parse a text with ``parse``: in a thread, unless that is little work. Askers take turns."""
    if _is_little(text):
        return parse(text)
    return await _thread.run(asker, parse, text)


async def parsed_body(parse: Parse[R], body: bytearray, asker: str) -> ParsedBody[R]:
    """The same for a body that may have media."""
    if len(body) <= _LITTLE_BODY:
        try:
            return ParsedBody(parse, body, asker, only_little=True)
        except _MuchWork:
            pass
    return await _thread.run(asker, ParsedBody, parse, body, asker)


class ParsedBody(Generic[R]):
    """A request and its media.

    Attributes:
        text_bytes: length of the body without the media.
    """

    def __init__(self, parse: Parse[R], body: bytearray, asker: str = "", *, only_little: bool = False) -> None:
        """Takes the body over. Raises InvalidRequest, and _MuchWork instead of parsing more than is
        ``only_little``."""
        self._parse = parse
        self._body = body
        self._asker = asker
        self._only_little = only_little
        short = self._parse_cut()
        self._is_cut = short is not None
        if short is not None:
            self.request, self._sources, self.text_bytes = short
        else:
            if only_little and not _is_little(body):
                raise _MuchWork
            self.request = parse(body)
            self._sources = self.request.media()
            media = [source.url if source.raw is None else source.raw for source in self._sources]
            self.text_bytes = len(body) - sum(map(len, media))
            body.clear()
        self.has_media = bool(self._sources)

    async def load(self, load: Callable[[list[MediaSource]], Awaitable[list[Item]]]) -> list[Item]:
        """Load the media with ``load``; let go of the body. Raises what ``load`` does."""
        if not self._is_cut:
            return await load(self._sources)
        try:
            items = await load(self._sources)
        except InvalidRequest:
            if len(self._body) > MAX_TEXT_BYTES:
                raise
            return await load((await parsed(self._parse, self._body, self._asker)).media())
        for source in self._sources:
            if source.payload is not None:
                source.payload.release()
        self._body.clear()
        return items

    def _parse_cut(self) -> tuple[R, list[MediaSource], int] | None:
        """The request, its media and the length of its text; None unless every payload has its place."""
        cut = _cut(self._body)
        if cut is None:
            return None
        skeleton, payloads = cut
        if self._only_little and not _is_little(skeleton):
            raise _MuchWork
        try:
            request = self._parse(skeleton)
        except InvalidRequest as error:
            if len(self._body) <= MAX_TEXT_BYTES or _PLACEHOLDER in error.message:
                return None
            raise  # the body as it is would be no text that is read
        sources = request.media()
        text_bytes = len(skeleton) - sum([len(source.url) for source in sources])
        found = 0
        for index, source in enumerate(sources):
            header, is_cut, number = source.url.partition(_PLACEHOLDER)
            if is_cut:
                is_data = header[:5].lower() == "data:" and header.find(",") == len(header) - 1
                if found == len(payloads) or number != str(found) or not is_data:
                    return None
                sources[index] = replace(source, url=header, payload=payloads[found])
                found += 1
        return (request, sources, text_bytes) if found == len(payloads) else None


class _MuchWork(Exception):
    """A text is nothing for the event loop."""


def _is_little(text: bytes | bytearray) -> bool:
    return len(text) <= _LITTLE_TEXT and text.count(b"{") + text.count(b"[") <= _FEW_BRACKETS


def _cut(body: bytearray) -> tuple[bytes, list[memoryview]] | None:
    r"""The body with placeholders, and what they stand for; None where there is nothing to gain.

    Some languages write ``\/`` for ``/``. They do from a payload's beginning on, so no more is searched of a body
    that can be parsed as it is if that is wrong.
    """
    view, rest, at, num_marks = memoryview(body).toreadonly(), 0, 0, 0
    pieces: list[memoryview | bytes] = []
    payloads: list[memoryview] = []
    while at < len(body):
        mark = _MARK.search(body, at, at + _PIECE)  # in pieces, as the loop's thread waits for the end of each
        if mark is None:
            at += _PIECE - _MARK_BYTES
            continue
        start = mark.end()
        end = body.find(b'"', start)
        num_marks += 1
        if end < 0 or num_marks > _MAX_MARKS:  # it is no JSON, or too many to gain by
            return None
        if end - start >= _MIN_BYTES:
            pieces += (view[rest:start], f"{_PLACEHOLDER}{len(payloads)}".encode())
            payload, rest = view[start:end], end
            looked_at = end if len(body) > MAX_TEXT_BYTES else min(end, start + _MANY_SLASHES)
            if body.find(b"\\", start, looked_at) >= 0:
                payload = memoryview(bytes(payload).replace(rb"\/", b"/"))
            payloads.append(payload)
        at = end
    if not payloads:
        return None
    pieces.append(view[rest:])
    return b"".join(pieces), payloads
