"""``custom:FILE``: requests from a file of JSON lines.

A line has one of

``messages``    as in an OpenAI chat request
``prompt``      the user's text (or ``question``), with ``images``, a list, before it
``turns``       a conversation: each is a text, or an object with ``prompt`` and ``images``; the server's own
                answers stand between them

and optionally ``max_tokens`` (or ``output_tokens``), ``timestamp`` (milliseconds from the begin, for arrivals of
kind trace), ``system`` (a text) and ``fields`` (more of the request's body). An image is a URL that begins with
``data:`` or ``http(s):``, or a file, relative to the workload's.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from epd_serve.bench.types import Item, Media, Message, Part
from epd_serve.bench.workloads.lengths import parse_lengths
from epd_serve.bench.workloads.options import Options, check_keys, parse_switch, read_lines

_Count = Annotated[int, msgspec.Meta(ge=1)]
_KINDS = ("messages", "prompt", "question", "turns")


class _Url(msgspec.Struct):
    url: str


class _Sound(msgspec.Struct):
    data: str
    format: str


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    image_url: str | _Url = ""
    audio_url: str | _Url = ""
    video_url: str | _Url = ""
    input_audio: _Sound | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _Turn(msgspec.Struct):
    prompt: str
    images: list[str] = []


class _Line(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)] | None = None
    prompt: str | None = None
    question: str | None = None
    turns: Annotated[list[str | _Turn], msgspec.Meta(min_length=1)] | None = None
    images: list[str] = []
    max_tokens: _Count | None = None
    output_tokens: _Count | None = None
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    system: str | None = None
    fields: dict[str, Any] = {}


class Custom:
    """The requests of a file, in its order.

    Settings: output_tokens (where a line has no max_tokens), ignore_eos (default false: answers end by
    themselves).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError that names the file and the line of a fault."""
        self.name = file.stem
        self._folder = file.resolve().parent
        self._output = options.take("output_tokens", parse_lengths, "64")
        self._fields = {"ignore_eos": True} if options.take("ignore_eos", parse_switch, "false") else {}
        options.check(f"custom:{file}")
        self._media = cache(self._read_media)
        self._lines = read_lines(file, self._parse)
        self.num_items: int | None = sum(len(turns) for _, _, turns in self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        index = 0
        for line_number, line, turns in self._lines:
            rng = Random(f"{seed}/{self.name}/{line_number}")
            kinds: set[str] = set()
            for turn, messages in enumerate(turns):
                parts = [part for message in messages for part in message.parts]
                kinds |= {part.mime.partition("/")[0] for part in parts if isinstance(part, Media)}
                yield Item(
                    index=index,
                    messages=messages,
                    max_tokens=line.max_tokens or line.output_tokens or self._output(rng),
                    workload=self.name,
                    modality="+".join(sorted(kinds)) or "text",
                    conversation=f"line{line_number}" if len(turns) > 1 else None,
                    turn=turn,
                    arrival_s=None if line.timestamp is None else line.timestamp / 1e3,
                    fields={**self._fields, **line.fields},
                )
                index += 1

    def _parse(self, number: int, found: dict[str, Any]) -> tuple[int, _Line, list[tuple[Message, ...]]]:
        check_keys(found, _Line.__struct_fields__)
        line = msgspec.convert(found, _Line)
        given = [kind for kind in _KINDS if getattr(line, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no request'}; write one of prompt, turns, messages")
        if line.messages is not None:
            turns = [tuple(self._message(one) for one in line.messages)]
        else:
            prompt = line.prompt or line.question or ""
            turns = [(self._turn(one),) for one in line.turns or [_Turn(prompt, line.images)]]
        if line.system is not None:
            turns[0] = (Message(role="system", parts=(line.system,)), *turns[0])
        return number, line, turns

    def _turn(self, turn: str | _Turn) -> Message:
        if isinstance(turn, str):
            return Message(role="user", parts=(turn,))
        pictures = [self._media("image", image) for image in turn.images]
        text = [turn.prompt] if turn.prompt or not pictures else []
        return Message(role="user", parts=(*pictures, *text))

    def _message(self, message: _Message) -> Message:
        content = message.content
        parts = [content] if isinstance(content, str) else [self._part(part) for part in content]
        return Message(role=message.role, parts=tuple(parts))

    def _part(self, part: _Part) -> Part:
        kind, _, suffix = part.type.partition("_")
        if part.type == "text":
            return part.text
        if part.type == "input_audio" and part.input_audio is not None:
            return Media(mime=f"audio/{part.input_audio.format}", data=_decode(part.input_audio.data))
        if suffix == "url" and kind in ("image", "audio", "video"):
            url = getattr(part, part.type)
            return self._media(kind, url.url if isinstance(url, _Url) else url)
        known = "text, input_audio, image_url, audio_url, video_url"
        raise ValueError(f"there are no parts of type {part.type!r}; known: {known}")

    def _read_media(self, kind: str, url: str) -> Media:
        if url.startswith(("http://", "https://")):
            return Media(mime=f"{kind}/*", url=url)
        if url.startswith("data:"):
            head, _, data = url.removeprefix("data:").partition(",")
            if not (head.startswith(f"{kind}/") and head.endswith(";base64")):
                raise ValueError(f"{url[:40]!r}: the data URL of an {kind} looks like data:{kind}/...;base64,...")
            return Media(mime=head.removesuffix(";base64"), data=_decode(data))
        path = self._folder / Path(url.removeprefix("file://")).expanduser()
        mime, _ = mimetypes.guess_type(path.name)
        if mime is None or not mime.startswith(f"{kind}/"):
            raise ValueError(f"{url[:80]!r} is no {kind}: neither a URL nor a file with the suffix of one")
        try:
            return Media(mime=mime, data=path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)  # its error is a ValueError
