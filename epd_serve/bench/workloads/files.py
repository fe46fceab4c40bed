"""Requests from files of JSON lines: Mooncake traces and a user's own.

``trace:FILE.jsonl``: requests of a Mooncake trace, at its times.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``. Each id names
the content of a block of 512 tokens (the last may be shorter): requests with equal leading ids share a prefix. The
text is generated; equal ids give equal text.

``custom:FILE``: requests from a file of JSON lines.

A line has one of

``messages``    as in an OpenAI chat request
``prompt``      the user's text, with a list ``images`` before it
``turns``       a conversation of texts and of objects with ``prompt`` and ``images``; the server's own answers
                come between them

and optionally ``max_tokens``, ``timestamp`` (milliseconds since the start, for --arrivals trace), ``system`` (a
text) and ``fields`` (further fields of the request's body). An image is a ``data:`` or ``http(s):`` URL, or a
file relative to the workload's.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from epd_serve.bench.types import Item, Media, Message, Part
from epd_serve.bench.workloads.notation import (
    Options,
    check_keys,
    parse_count,
    parse_factor,
    parse_lengths,
    parse_switch,
    read_lines,
)
from epd_serve.bench.workloads.synthetic import text_of

#: Tokens per block in the traces of the Mooncake paper.
BLOCK_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; ``timestamp`` in ms."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...] = ()


class Trace:
    """The requests of a trace.

    Settings: length_scale (factor on inputs and outputs, for models with a short context), requests (how many to
    take), ignore_eos (default true: answers have the trace's lengths).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError for an invalid file."""
        self.name = file.stem
        self._length_scale = options.take("length_scale", parse_factor, "1")
        num_requests = options.take("requests", parse_count, "")
        self._fields = {"ignore_eos": True} if options.take("ignore_eos", parse_switch, "true") else {}
        options.check(f"trace:{file}")
        lines = read_lines(file, lambda _, line: parse_line(line))
        self._lines = sorted(lines, key=lambda line: line.timestamp)[:num_requests]
        self.num_items: int | None = len(self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        begin_ms = self._lines[0].timestamp
        for index, line in enumerate(self._lines):
            yield Item(
                index=index,
                messages=(Message(role="user", parts=(self._make_text(line, seed),)),),
                max_tokens=self._scale(line.output_length),
                workload=self.name,
                arrival_s=(line.timestamp - begin_ms) / 1e3,
                fields=self._fields,
            )

    def _make_text(self, line: TraceLine, seed: int) -> str:
        """Return the prompt of a line. Blocks scale with the whole, so a shared prefix stays shared."""
        words: list[str] = []
        left = self._scale(line.input_length)
        for hash_id in line.hash_ids:
            block = text_of(self._scale(BLOCK_TOKENS), Random(f"{seed}/block/{hash_id}")).split()
            words += block[:left]
            left -= min(left, len(block))
        if left:  # ids are missing or do not cover the input
            words += text_of(left, Random(f"{seed}/rest/{line.timestamp}/{line.hash_ids}")).split()
        return " ".join(words)

    def _scale(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._length_scale))


def parse_line(line: Mapping[str, Any]) -> TraceLine:
    """Parse a line. Raises ValueError or msgspec's ValidationError."""
    check_keys(line, TraceLine.__struct_fields__)
    found = msgspec.convert(line, TraceLine)
    if len(found.hash_ids) > -(-found.input_length // BLOCK_TOKENS):
        raise ValueError(
            f"hash_ids: {len(found.hash_ids)} blocks of {BLOCK_TOKENS} tokens exceed input_length "
            f"{found.input_length}"
        )
    return found


_KINDS = ("messages", "prompt", "turns")


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Turn(msgspec.Struct):
    prompt: str
    images: list[str] = []


class _Line(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)] | None = None
    prompt: str | None = None
    turns: Annotated[list[str | _Turn], msgspec.Meta(min_length=1)] | None = None
    images: list[str] = []
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    system: str | None = None
    fields: dict[str, Any] = {}


class Custom:
    """The requests of a file, in order.

    Settings: output_tokens (for lines without max_tokens), ignore_eos (default false: answers end naturally).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError that names the file and the line of a fault."""
        self.name = file.stem
        self._folder = file.resolve().parent
        self._output = options.take("output_tokens", parse_lengths, "64")
        self._fields = {"ignore_eos": True} if options.take("ignore_eos", parse_switch, "false") else {}
        options.check(f"custom:{file}")
        self._image = cache(self._read_image)
        self._lines = read_lines(file, self._parse_line)
        self.num_items: int | None = sum(len(turns) for _, _, turns in self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        index = 0
        for line_number, line, turns in self._lines:
            rng = Random(f"{seed}/{self.name}/{line_number}")
            kinds: set[str] = set()
            for turn, messages in enumerate(turns):
                kinds |= {_modality(part) for message in messages for part in message.parts} - {"text"}
                yield Item(
                    index=index,
                    messages=messages,
                    max_tokens=line.max_tokens or self._output(rng),
                    workload=self.name,
                    modality="+".join(sorted(kinds)) or "text",
                    conversation=f"line{line_number}" if len(turns) > 1 else None,
                    turn=turn,
                    arrival_s=None if line.timestamp is None else line.timestamp / 1e3,
                    fields={**self._fields, **line.fields},
                )
                index += 1

    def _parse_line(self, number: int, found: dict[str, Any]) -> tuple[int, _Line, list[tuple[Message, ...]]]:
        check_keys(found, _Line.__struct_fields__)
        line = msgspec.convert(found, _Line)
        given = [kind for kind in _KINDS if getattr(line, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no request'}; write one of prompt, turns, messages")
        if line.messages is not None:
            turns = [tuple(self._convert_message(one) for one in line.messages)]
        else:
            turns = [(self._convert_turn(one),) for one in line.turns or [_Turn(line.prompt or "", line.images)]]
        if line.system is not None:
            turns[0] = (Message(role="system", parts=(line.system,)), *turns[0])
        return number, line, turns

    def _convert_turn(self, turn: str | _Turn) -> Message:
        if isinstance(turn, str):
            return Message(role="user", parts=(turn,))
        pictures = [self._image(image) for image in turn.images]
        text = [turn.prompt] if turn.prompt or not pictures else []
        return Message(role="user", parts=(*pictures, *text))

    def _convert_message(self, message: _Message) -> Message:
        if isinstance(message.content, str):
            return Message(role=message.role, parts=(message.content,))
        return Message(role=message.role, parts=tuple(self._convert_part(part) for part in message.content))

    def _convert_part(self, part: dict[str, Any]) -> Part:
        match part:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
                return self._image(url)
            case {"type": "video_url" | "audio_url" | "input_audio"}:
                return part
        raise ValueError(f"unknown content part {str(part)[:60]}; known: text, input_audio, image/audio/video_url")

    def _read_image(self, url: str) -> Media:
        if url.startswith(("http://", "https://")):
            return Media(mime="image/*", url=url)
        if url.startswith("data:"):
            head, _, data = url.removeprefix("data:").partition(",")
            if not (head.startswith("image/") and head.endswith(";base64")):
                raise ValueError(f"{url[:40]!r}: an image's data URL looks like data:image/png;base64,...")
            return Media(mime=head.removesuffix(";base64"), data=base64.b64decode(data, validate=True))
        path = self._folder / Path(url.removeprefix("file://")).expanduser()
        mime, _ = mimetypes.guess_type(path.name)
        if mime is None or not mime.startswith("image/"):
            raise ValueError(f"{url[:80]!r} is neither a URL nor a file with an image's suffix")
        try:
            return Media(mime=mime, data=path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error


def _modality(part: Part) -> str:
    if isinstance(part, Media):
        return part.mime.partition("/")[0]
    return "text" if isinstance(part, str) else str(part["type"]).removeprefix("input_").partition("_")[0]
